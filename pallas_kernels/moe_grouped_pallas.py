"""Routed MXFP4 experts of a prompt on Triton: rows sorted by expert, a program a tile of rows.

The products are those of the decode step (moe_mxfp4_pallas.py); only the rows that a program serves
come from a sorted list, and there are more of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation
from pallas_kernels.moe_groups import experts_health, group_pairs
from pallas_kernels.moe_mxfp4_pallas import MoeTiles, down_rows, sum_choices, up_rows
from pallas_kernels.moe_types import Mxfp4Bank
from pallas_kernels.mxfp4 import WORD
from pallas_kernels.mxfp4_pallas import decoders, joined, prepared, tiled

UP_NAME = "moe_mxfp4_up_grouped"
DOWN_NAME = "moe_mxfp4_down_grouped"
CHUNK_ROWS = 2048  # at once: a result per pair is kept until the rows are summed


def moe_grouped_pallas(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.moe_mxfp4`; any number of rows."""
    run = functools.partial(_run, bank=bank, activation=activation, interpret=interpret)
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


def _tiles(pairs: int, experts: int, inner: int, *, exact: bool) -> MoeTiles:
    """Rows of a tile: near an expert's mean load."""
    if exact:
        return MoeTiles(16, 8, 1, 16, 16)
    rows = 16 if pairs <= 24 * experts else 32
    return MoeTiles(rows, min(16, inner & -inner), 1, 32, 32)


def _run(z, experts, weights, bank, *, activation, interpret):
    exact, count = z.dtype == jnp.float32, bank.w13.shape[0]
    tiles = _tiles(experts.size, count, bank.w2.shape[2] * WORD, exact=exact)
    groups = group_pairs(experts, count, tiles.rows)
    operands = (*groups[:4], z, weights, bank)
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
    z, decoder = prepared(decoder, z)
    table = (order, expert, first, end)
    hidden = launch.launch(
        functools.partial(
            _kernel,
            body=up_rows,
            choices=weights.shape[1],
            activation=activation,
            decoder=decoder,
            tiles=tiles,
        ),
        *table,
        z,
        tiled(bank.w13),
        joined(bank.w13_scale),
        name=UP_NAME,
        grid=(inner // tiles.inner, expert.size),
        out_shape=jax.ShapeDtypeStruct((pairs, inner), z.dtype),
        interpret=interpret,
        num_warps=tiles.warps,
    )
    return launch.launch(
        functools.partial(
            _kernel, body=down_rows, choices=weights.shape[1], decoder=decoder, tiles=tiles
        ),
        *table,
        weights,
        hidden,
        tiled(bank.w2),
        joined(bank.w2_scale),
        name=DOWN_NAME,
        grid=(latent // tiles.columns, expert.size),
        out_shape=jax.ShapeDtypeStruct((pairs, latent), jnp.float32),
        interpret=interpret,
        num_warps=tiles.warps,
    )


def _kernel(order_ref, expert_ref, first_ref, end_ref, *refs, body, choices, **static):
    """Run `body` of one tile of pairs (grid's second axis) and tile of features (its first)."""
    feature_tile, tile = pl.program_id(0), pl.program_id(1)
    pairs, bank_ref = order_ref.shape[0], refs[-3]
    expert = expert_ref[tile]

    @pl.when(expert < bank_ref.shape[0])
    def _():
        at = first_ref[tile] + jnp.arange(static["tiles"].rows, dtype=jnp.int32)
        inside = at < end_ref[tile]
        pair = launch.load(order_ref.at[jnp.where(inside, at, 0)])
        row = pair // choices
        body(*refs, expert, row, jnp.where(inside, pair, pairs), tile=feature_tile, **static)
