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
CHUNK_ROWS = 8192  # at once: a result per pair is kept until the rows are summed


@dataclasses.dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of the two launches."""

    rows: int  # of one expert, for a program
    inner: int  # gate and as many up features of one program
    columns: int  # output columns at once
    turns: int  # times as many output columns of one program
    warps: int
    stages: int

    def narrow(self) -> GroupedTiles:
        """With fewer weights at once, for AMD: more leave a wave of 64 alone on its SIMD."""
        columns = min(self.columns, 64)
        turns = self.turns * self.columns // columns
        return dataclasses.replace(self, inner=min(self.inner, 32), columns=columns, turns=turns)


def grouped_tiles(pairs: int, count: int, inner: int, latent: int, *, exact: bool) -> GroupedTiles:
    """Choose tiles for so many pairs of `count` experts; `exact`: float32.

    128 features or columns are two of a warp-group's instructions for each row that is loaded; with
    turns a tile's table is loaded once for several. Measured in benchmarks/RESULTS.md.
    """
    if exact:
        return GroupedTiles(16, 8, 16, 1, 1, 1)
    rows = 32 if pairs <= 32 * count else 64
    columns = math.gcd(latent, 128)
    return GroupedTiles(rows, math.gcd(inner, 64), columns, math.gcd(latent // columns, 4), 4, 3)


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
    count, inner = bank.w13.shape[0], bank.w2.shape[2] * WORD
    tiles = tiles or grouped_tiles(
        min(len(experts), CHUNK_ROWS) * experts.shape[1],
        count,
        inner,
        z.shape[1],
        exact=z.dtype == jnp.float32,
    )
    run = functools.partial(
        _run, bank=bank, activation=activation, interpret=interpret, tiles=tiles
    )
    rows, health = z.shape[0], experts_health(experts, count)
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
    operands = (groups.pairs, groups.expert, in_weights_order(z), weights, bank)
    run = functools.partial(_launches, activation=activation, interpret=interpret)
    cuda, portable = decoders(z.dtype, interpret=interpret)
    parts = launch.by_platform(
        *operands,
        cuda=functools.partial(run, decoder=cuda, tiles=tiles),
        portable=functools.partial(run, decoder=portable, tiles=tiles.narrow()),
        interpret=interpret,
    )
    return sum_choices(parts, experts, count)


def _launches(pairs, expert, z, weights, bank, *, activation, interpret, tiles, decoder):
    latent, inner = z.shape[1], bank.w2.shape[2] * WORD
    table = (pairs, expert)
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
        out_shape=jax.ShapeDtypeStruct((weights.size, inner), z.dtype),
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
        grid=(latent // (tiles.columns * tiles.turns), expert.size),
        out_shape=jax.ShapeDtypeStruct((weights.size, latent), jnp.float32),
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

    def body(expert, pair, inside):
        row = jnp.where(inside, pair // choices, 0)
        sums = product(decoder, w13_ref, scale_ref, z_ref, expert, source, row, inside)
        gate, up = gate_above_up(sums, HALF_TILE)
        hidden = gated(activation, gate, up).astype(hidden_ref.dtype)
        column = place_in_weights_order(first + jnp.arange(tiles.inner, dtype=jnp.int32))
        store_by_pair(hidden_ref, hidden, pair, column)

    _with_pairs(table, w13_ref.shape[0], weights_ref.size, body)


def _down_kernel(*refs, decoder, tiles):
    """Output columns of a tile of pairs, weighted and stored by pair."""
    *table, weights_ref, hidden_ref, w2_ref, scale_ref, out_ref = refs
    choices = weights_ref.shape[1]
    first = pl.program_id(0) * (tiles.columns * tiles.turns)

    def body(expert, pair, inside):
        row = jnp.where(inside, pair, 0)
        weight = launch.load(weights_ref.at[row // choices, row % choices])

        def some_columns(turn, _):
            column = first + turn * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
            sums = product(decoder, w2_ref, scale_ref, hidden_ref, expert, column, row, inside)
            store_by_pair(out_ref, sums * weight[None, :], pair, column)

        lax.fori_loop(0, tiles.turns, some_columns, None)

    _with_pairs(table, w2_ref.shape[0], weights_ref.size, body)


def _with_pairs(table, count, size, body):
    """Run `body(expert, pair i32[R], inside bool[R])` if the tile, grid's second axis, has pairs.

    `pair` is `size` where it is not `inside`.
    """
    pairs_ref, expert_ref = table
    tile = pl.program_id(1)
    expert = expert_ref[tile]

    @pl.when(expert < count)
    def _():
        place = jnp.arange(pairs_ref.shape[1], dtype=jnp.int32)
        pair = launch.load(pairs_ref.at[launch.mesh(tile, place)])
        body(expert, pair, pair < size)
