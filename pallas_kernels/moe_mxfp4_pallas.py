"""Routed MXFP4 experts of a decode step on Triton: each chosen expert's weights are read once.

Both launches have a program per (row, choice) pair and tile of features. A pair whose expert an
earlier pair also names leaves at once; the others serve every row that chose their expert. The
first launch applies gate, up and activation, the second the down projection and the row's weight of
the expert; their results lie by pair, so the sum over a row's choices has a fixed order, whatever
the company. A program is one warp, and weights go from memory to its registers in the order that
the matrix instructions take (see mxfp4_pallas.py); many programs at once hide the latency.
"""

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
from pallas_kernels.health import BIT_EXPERT
from pallas_kernels.loops import run_ahead, run_ring
from pallas_kernels.moe_types import Mxfp4Bank
from pallas_kernels.mxfp4 import GROUP, WORD, block_groups
from pallas_kernels.mxfp4_pallas import (
    Decoder,
    blocks_of,
    decoders,
    joined,
    lift,
    load_operands,
    load_words,
    multiply,
    prepared,
    raised,
    tiled,
)

UP_NAME = "moe_mxfp4_up"
DOWN_NAME = "moe_mxfp4_down"
HELD = 256  # groups of 32 columns, times rows, that stay in registers for all output columns
DEPTH = 2  # loads under way where the rows do not fit
HALF_TILE = 8  # rows of half a matrix instruction: gate above, up below


@dataclasses.dataclass(frozen=True)
class MoeTiles:
    """Tile sizes of the two launches; weights are the left operand, rows the narrow right one."""

    rows: int  # rows that a program serves at once
    inner: int  # gate and as many up features of one program
    inner_depth: int  # blocks of columns whose loads are under way
    columns: int  # output columns of one program
    column_step: int  # and of one product
    prepare: bool = True  # the rows once, by a launch of its own, not in each program
    splits: int = 1  # pieces of the depth of gate and up
    warps: int = 1


def moe_tiles(pairs: int, latent: int, *, exact: bool) -> MoeTiles:
    """Choose tiles for `pairs` (row, choice) pairs; `exact`: float32 products.

    Measured in benchmarks/RESULTS.md.
    """
    if exact:
        return MoeTiles(16, 8, 1, 16, 16)
    if pairs <= 32:  # few programs: small ones, and no launch to prepare one or two rows
        splits = math.gcd(latent // (GROUP * block_groups(latent)), 4)
        columns = _columns(latent, 16, 4)
        return MoeTiles(8, 8 // splits, 2, columns, 16, prepare=False, splits=splits)
    return MoeTiles(8, 8, 2, _columns(latent, 16, 7), 16)


def _columns(latent: int, step: int, most: int) -> int:
    """Output columns of one program: up to `most` steps."""
    steps = latent // step
    return step * max(count for count in range(1, most + 1) if steps % count == 0)


def moe_mxfp4_pallas(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    interpret: bool,
    tiles: MoeTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.moe_mxfp4`; W at most MOST_ROWS."""
    exact = z.dtype == jnp.float32
    tiles = tiles or moe_tiles(experts.size, z.shape[1], exact=exact)
    operands = (z, experts, weights, bank.w13, bank.w13_scale, bank.w2, bank.w2_scale)
    run = functools.partial(_run, activation=activation, interpret=interpret)
    cuda_decoder, portable_decoder = decoders(z.dtype, interpret=interpret)
    portable = functools.partial(
        run,
        decoder=portable_decoder,
        # AMD's matrix unit has no side of 8.
        tiles=dataclasses.replace(tiles, rows=max(16, tiles.rows)),
    )
    cuda = functools.partial(run, decoder=cuda_decoder, tiles=tiles)
    return launch.by_platform(*operands, cuda=cuda, portable=portable, interpret=interpret)


def _run(
    z, experts, weights, w13, w13_scale, w2, w2_scale, *, activation, interpret, tiles, decoder
):
    latent = z.shape[1]
    pairs, inner = experts.size, w2.shape[2] * WORD
    w13, w2 = tiled(w13), tiled(w2)
    w13_scale, w2_scale = joined(w13_scale), joined(w2_scale)
    if tiles.prepare:
        z, decoder = prepared(decoder, z)
    hidden = launch.launch(
        functools.partial(_up_kernel, activation=activation, decoder=decoder, tiles=tiles),
        experts,
        z,
        w13,
        w13_scale,
        name=UP_NAME,
        grid=(inner // tiles.inner, pairs),  # neighbors read neighboring weights
        out_shape=jax.ShapeDtypeStruct((pairs, inner), z.dtype),
        interpret=interpret,
        num_warps=tiles.warps,
    )
    parts, health = launch.launch(
        functools.partial(_down_kernel, decoder=decoder, tiles=tiles),
        experts,
        weights,
        hidden,
        w2,
        w2_scale,
        name=DOWN_NAME,
        grid=(pairs, latent // tiles.columns),
        out_shape=(
            jax.ShapeDtypeStruct((pairs, latent), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.uint32),
        ),
        interpret=interpret,
        num_warps=tiles.warps,
    )
    return sum_choices(parts, experts, w13.shape[0]), health.reshape(())


def sum_choices(parts, experts, count):
    """f32[W * J, Z] by pair -> f32[W, Z]; what no program wrote may hold anything."""
    valid = ((experts >= 0) & (experts < count))[:, :, None]
    return jnp.sum(jnp.where(valid, parts.reshape(*experts.shape, -1), 0.0), axis=1)


def all_ids(experts_ref):
    """The ids of all pairs i32[P], P a power of two, and which of them exist."""
    rows, choices = experts_ref.shape
    pairs = rows * choices
    index = jnp.arange(pl.next_power_of_2(pairs), dtype=jnp.int32)
    at = jnp.minimum(index, pairs - 1)
    return launch.load(experts_ref.at[at // choices, at % choices]), index < pairs


def rows_of_expert(experts_ref, pair, expert_count, body, slots):
    """Run `body(expert, row i32[R], pair i32[R])` for the rows that chose the expert of `pair`.

    Only the first pair of an expert does; `pair` is W * J in unused places. Rows beyond R come in
    further calls, which read the weights again.
    """
    rows, choices = experts_ref.shape
    pairs = rows * choices
    expert = experts_ref[pair // choices, pair % choices]
    ids, inside = all_ids(experts_ref)
    same = inside & (ids == expert)
    index = jnp.arange(ids.size, dtype=jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)

    def after(last):
        return jnp.min(jnp.where(same & (index > last), index, pairs))

    @pl.when((after(-1) == pair) & (expert >= 0) & (expert < expert_count))
    def _():
        count = jnp.sum(same.astype(jnp.int32))

        def serve(chunk, last):
            def fill(place, carry):
                taken, last = carry
                last = after(last)
                return jnp.where(slot == place, last, taken), last

            here = jnp.minimum(count - chunk * slots, slots)
            taken = jnp.full((slots,), pairs, jnp.int32)
            taken, last = lax.fori_loop(0, here, fill, (taken, last))
            # Unused places read the first row too: an address more would be a load more.
            body(expert, jnp.where(taken < pairs, taken, pair) // choices, taken)
            return last

        if rows <= slots:
            serve(0, pair - 1)
        else:
            lax.fori_loop(0, (count + slots - 1) // slots, serve, pair - 1)


def _up_kernel(*refs, **static):
    up_tile(*refs, pair=pl.program_id(1), tile=pl.program_id(0), **static)


def _down_kernel(experts_ref, weights_ref, hidden_ref, w2_ref, *refs, **static):
    *others, health_ref = refs
    pair, tile = pl.program_id(0), pl.program_id(1)

    @pl.when((pair == 0) & (tile == 0))
    def _():
        ids, inside = all_ids(experts_ref)
        bad = inside & ((ids < -1) | (ids >= w2_ref.shape[0]))
        health_ref[0] = jnp.max(jnp.where(bad, BIT_EXPERT, 0)).astype(jnp.uint32)

    down_tile(experts_ref, weights_ref, hidden_ref, w2_ref, *others, pair=pair, tile=tile, **static)


def gate_above_up(sums, part):
    """Part f32[.., R], in turn `part` gate features and the same up features: two f32[n, R]."""
    rows = sums.shape[-1]
    features = sums.size // (2 * rows)
    halves = lax.split(sums.reshape(features // part, 2, part, rows), [1, 1], axis=1)
    gate, up = (half.reshape(features, rows) for half in halves)
    return gate, up


def store_by_pair(ref, values, pair, column):
    """Store [columns, R] at ref[pair, column]; pairs from the ref's end on are unused places."""
    at = (
        jnp.broadcast_to(pair[None, :], values.shape),
        jnp.broadcast_to(column[:, None], values.shape),
    )
    launch.store(ref.at[at], values, mask=(pair < ref.shape[0])[None, :])


def up_tile(
    experts_ref,  # i32[W, J]
    z_ref,  # [W, Z]
    w13_ref,  # u32[E, 2I, Z/8]
    scale_ref,  # joined u8[E, 2I, Z/32]
    hidden_ref,  # out [W * J, I]
    *,
    pair,
    **static,
):
    """Inner features of one tile for the rows of `pair`'s expert, if it is its first pair."""
    body = functools.partial(up_rows, z_ref, w13_ref, scale_ref, hidden_ref, **static)
    tiles = static["tiles"]
    rows_of_expert(experts_ref, pair, w13_ref.shape[0], body, tiles.rows // tiles.splits)


def down_tile(
    experts_ref,  # i32[W, J]
    weights_ref,  # f32[W, J]
    hidden_ref,  # [W * J, I]
    w2_ref,  # u32[E, Z, I/8]
    scale_ref,  # joined u8[E, Z, I/32]
    out_ref,  # out f32[W * J, Z]
    *,
    pair,
    **static,
):
    """Output columns of one tile for the rows of `pair`'s expert, if it is its first pair."""
    body = functools.partial(
        down_rows, weights_ref, hidden_ref, w2_ref, scale_ref, out_ref, **static
    )
    rows_of_expert(experts_ref, pair, w2_ref.shape[0], body, static["tiles"].rows)


def up_rows(
    z_ref,
    w13_ref,
    scale_ref,
    hidden_ref,
    expert,  # i32[]
    row,  # i32[R]
    pair,  # i32[R], W * J in unused places
    *,
    tile,
    activation: Activation,
    decoder: Decoder,
    tiles: MoeTiles,
):
    """Inner features of tile `tile` of one expert for some rows, stored by pair."""
    inner = hidden_ref.shape[1]
    blocks, groups = blocks_of(w13_ref)
    # Rows of a matrix instruction: gate above, up below, each `part` features in `splits` pieces of
    # the depth; its columns: the rows' same pieces. What counts is the sums of piece by same piece.
    splits, most = tiles.splits, row.size
    part, rounds = HALF_TILE // splits, blocks // splits
    lane = jnp.arange(2 * splits * tiles.inner, dtype=jnp.int32)
    half = lax.rem(lane, jnp.int32(HALF_TILE))
    piece = lax.div(half, jnp.int32(part))
    feature = tile * tiles.inner + (lane >> 4) * part + lax.rem(half, jnp.int32(part))
    source = feature + (lane >> 3 & 1) * inner
    spread = lax.broadcast_in_dim(row, (splits, most), (1,)).reshape(splits * most)
    column = jnp.arange(splits * most, dtype=jnp.int32)
    column_piece = lax.div(column, jnp.int32(most))

    def load(block):
        return load_words(w13_ref, scale_ref, expert, source, block + piece * rounds, groups)

    def add(block, loaded, total):
        at = block + column_piece * rounds
        operands = load_operands(decoder, z_ref, spread, at, groups)
        words, scales = loaded
        return multiply(decoder, words, scales, operands, total)

    sums = jnp.zeros((lane.size, column.size), jnp.float32)
    sums = raised(decoder, run_ring(load, add, rounds, sums, tiles.inner_depth))
    if splits > 1:
        sums = jnp.where(piece[:, None] == column_piece[None, :], sums, 0.0)
        sums = jnp.sum(sums.reshape(lane.size, splits, most), axis=1)
        sums = jnp.sum(sums.reshape(lane.size // HALF_TILE, splits, part, most), axis=1)
    gate, up = gate_above_up(sums, part)
    hidden = gated(activation, gate, up).astype(hidden_ref.dtype)
    place = tile * tiles.inner + jnp.arange(tiles.inner, dtype=jnp.int32)
    if decoder.ready:
        hidden = lift(decoder, hidden)
    store_by_pair(hidden_ref, hidden, pair, place)


def down_rows(
    weights_ref,
    hidden_ref,
    w2_ref,
    scale_ref,
    out_ref,
    expert,  # i32[]
    row,  # i32[R]
    pair,  # i32[R], W * J in unused places
    *,
    tile,
    decoder: Decoder,
    tiles: MoeTiles,
):
    """Output columns of tile `tile` of one expert for some rows, weighted and stored by pair."""
    pairs, choices = out_ref.shape[0], weights_ref.shape[1]
    blocks, groups = blocks_of(w2_ref)
    inside = pair < pairs
    at = jnp.where(inside, pair, 0)
    weight = launch.load(weights_ref.at[row, at % choices])
    zeros = jnp.zeros((tiles.column_step, row.size), jnp.float32)
    factor = raised(decoder, zeros + weight[None, :])

    def column(step):
        first = tile * tiles.columns + step * tiles.column_step
        return first + jnp.arange(tiles.column_step, dtype=jnp.int32)

    def load(step, block):
        return load_words(w2_ref, scale_ref, expert, column(step), block, groups)

    def operands(block):
        return load_operands(decoder, hidden_ref, at, block, groups, mask=inside)

    def finish(step, sums):
        store_by_pair(out_ref, sums * factor, pair, column(step))

    steps = tiles.columns // tiles.column_step

    if blocks * groups * row.size <= HELD and hidden_ref.dtype == jnp.bfloat16:
        held = [operands(block) for block in range(blocks)]

        def use(step, loaded, carry):
            total = zeros
            for (words, scales), right in zip(loaded, held, strict=True):
                total = multiply(decoder, words, scales, right, total)
            finish(step, total)
            return carry

        run_ahead(lambda step: [load(step, block) for block in range(blocks)], use, steps, 0)
        return

    def add(block, loaded, total):
        words, scales = loaded
        return multiply(decoder, words, scales, operands(block), total)

    def whole(step, carry):
        finish(step, run_ring(lambda block: load(step, block), add, blocks, zeros, DEPTH))
        return carry

    lax.fori_loop(0, steps, whole, 0)
