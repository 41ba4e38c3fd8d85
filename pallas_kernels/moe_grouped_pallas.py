"""Routed MXFP4 experts of a prompt on Triton: rows sorted by expert, a program a tile of rows."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.moe_groups import experts_health, group_pairs
from pallas_kernels.moe_mxfp4_pallas import (
    HALF_TILE,
    gate_above_up,
    store_by_pair,
    sum_choices,
)
from pallas_kernels.moe_types import Mxfp4Bank
from pallas_kernels.mxfp4 import WORD
from pallas_kernels.mxfp4_pallas import decoders, joined, tiled
from pallas_kernels.mxfp4_scaled_pallas import in_weights_order, place_in_weights_order, product

UP_NAME = "moe_mxfp4_up_grouped"
DOWN_NAME = "moe_mxfp4_down_grouped"
CHUNK_ROWS = 4096  # at once: a result per pair is kept until the rows are summed


@dataclasses.dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of the two launches."""

    rows: int  # of one expert, for a program
    inner: int  # gate and as many up features of one program
    columns: int  # output columns of one program
    warps: int
    stages: int


def grouped_tiles(latent: int, *, exact: bool) -> GroupedTiles:
    """Choose tiles: the 64 rows of a warp-group instruction are features; `exact`: float32."""
    if exact:
        return GroupedTiles(16, 8, 16, 1, 1)
    return GroupedTiles(64, 32, math.gcd(latent, 64), 4, 3)


def moe_grouped_pallas(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    interpret: bool,
    tiles: GroupedTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.moe_mxfp4`; any number of rows."""
    tiles = tiles or grouped_tiles(z.shape[1], exact=z.dtype == jnp.float32)
    run = functools.partial(
        _run, bank=bank, activation=activation, interpret=interpret, tiles=tiles
    )
    rows, health = z.shape[0], experts_health(experts, bank.w13.shape[0])
    if rows <= CHUNK_ROWS:
        return run(z, experts, weights), health
    pad = -rows % CHUNK_ROWS
    chunks = (
        jnp.pad(array, ((0, pad), (0, 0)), constant_values=fill).reshape(
            -1, CHUNK_ROWS, array.shape[1]
        )
        for array, fill in ((z, 0), (experts, -1), (weights, 0))
    )
    out = lax.map(lambda chunk: run(*chunk), tuple(chunks))
    return out.reshape(-1, z.shape[1])[:rows], health


def _run(z, experts, weights, bank, *, activation, interpret, tiles):
    count = bank.w13.shape[0]
    groups = group_pairs(experts, count, tiles.rows)
    operands = (*groups[:4], in_weights_order(z), weights, bank)
    run = functools.partial(_launches, activation=activation, interpret=interpret, tiles=tiles)
    cuda, portable = decoders(z.dtype, interpret=interpret)
    parts = launch.by_platform(
        *operands,
        cuda=functools.partial(run, decoder=cuda),
        portable=functools.partial(run, decoder=portable),
        interpret=interpret,
    )
    return sum_choices(parts, experts, count)


def _launches(
    order, expert, first, end, z, weights, bank, *, activation, interpret, tiles, decoder
):
    pairs, latent, inner = order.size, z.shape[1], bank.w2.shape[2] * WORD
    table = (order, expert, first, end)
    options = {"interpret": interpret, "num_warps": tiles.warps, "num_stages": tiles.stages}
    hidden = launch.launch(
        functools.partial(_up_kernel, activation=activation, decoder=decoder, tiles=tiles),
        *table,
        weights,
        z,
        tiled(bank.w13),
        joined(bank.w13_scale),
        name=UP_NAME,
        grid=(inner // tiles.inner, expert.size),
        out_shape=jax.ShapeDtypeStruct((pairs, inner), z.dtype),
        **options,
    )
    return launch.launch(
        functools.partial(_down_kernel, decoder=decoder, tiles=tiles),
        *table,
        weights,
        hidden,
        tiled(bank.w2),
        joined(bank.w2_scale),
        name=DOWN_NAME,
        grid=(latent // tiles.columns, expert.size),
        out_shape=jax.ShapeDtypeStruct((pairs, latent), jnp.float32),
        **options,
    )


def _up_kernel(*refs, activation, decoder, tiles):
    """Inner features of a tile of pairs, stored by pair in the order of weights."""
    *table, weights_ref, z_ref, w13_ref, scale_ref, hidden_ref = refs
    inner, choices = hidden_ref.shape[1], weights_ref.shape[1]
    first = pl.program_id(0) * tiles.inner
    # Eight gate features above eight up features: a thread has both of a feature.
    lane = jnp.arange(2 * tiles.inner, dtype=jnp.int32)
    source = first + (lane >> 4) * HALF_TILE + (lane & 7) + (lane >> 3 & 1) * inner

    def body(expert, read, pair):
        sums = product(decoder, w13_ref, scale_ref, z_ref, expert, source, read // choices)
        gate, up = gate_above_up(sums, HALF_TILE)
        hidden = gated(activation, gate, up).astype(hidden_ref.dtype)
        column = place_in_weights_order(first + jnp.arange(tiles.inner, dtype=jnp.int32))
        store_by_pair(hidden_ref, hidden, pair, column)

    _with_pairs(table, tiles.rows, w13_ref.shape[0], body)


def _down_kernel(*refs, decoder, tiles):
    """Output columns of a tile of pairs, weighted and stored by pair."""
    *table, weights_ref, hidden_ref, w2_ref, scale_ref, out_ref = refs
    choices = weights_ref.shape[1]
    column = pl.program_id(0) * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)

    def body(expert, read, pair):
        weight = launch.load(weights_ref.at[read // choices, read % choices])
        sums = product(decoder, w2_ref, scale_ref, hidden_ref, expert, column, read)
        store_by_pair(out_ref, sums * weight[None, :], pair, column)

    _with_pairs(table, tiles.rows, w2_ref.shape[0], body)


def _with_pairs(table, rows, count, body):
    """Run `body(expert, read i32[R], pair i32[R])` if the tile, grid's second axis, has pairs.

    Both are its pairs; unused places read one of another tile, and are W * J in `pair`.
    """
    order_ref, expert_ref, first_ref, end_ref = table
    tile = pl.program_id(1)
    expert = expert_ref[tile]

    @pl.when(expert < count)
    def _():
        at = first_ref[tile] + jnp.arange(rows, dtype=jnp.int32)
        inside = at < end_ref[tile]
        read = launch.load(order_ref.at[jnp.where(inside, at, 0)])
        body(expert, read, jnp.where(inside, read, order_ref.shape[0]))
