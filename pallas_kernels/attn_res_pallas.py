"""Attention residuals on Triton: inner products of a row's vectors, then its mix, by pieces.

The first launch multiplies, on the matrix unit, the blocks of a row and its new partial sum with
each other and with the query, a program for each piece of columns. The second adds the pieces in
order and has with them the scores, the weights, and the norm of the mix before there is a mix:
|sum w_i b_i|^2 = sum w_i w_j <b_i, b_j>. So no program works on a whole row: one multiprocessor
needs 3.5 us on an H200 only to read and write it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.mxfp4 import GROUP, LANES, WORD
from pallas_kernels.mxfp4_pallas import core_order

PRODUCTS_NAME, MIX_NAME = "attn_res_products", "attn_res_mix"
PART, HIGH, LOW = range(3)  # rows of the second half: the partial sum, the query in two pieces


@dataclasses.dataclass(frozen=True)
class AttnResTiles:
    """Columns of one program in the first launch, columns and warps in the second."""

    piece: int = 128
    columns: int = 1024
    warps: int = 4


def attn_res_pallas(
    blocks: jax.Array,  # [M, W, D]
    count: jax.Array,  # i32[]
    part: jax.Array,  # [W, D]
    query_norm: jax.Array,  # [D]
    query_proj: jax.Array,  # [D]
    norm: jax.Array,  # [D]
    *,
    delta: jax.Array | None,
    eps: float,
    interpret: bool,
    tiles: AttnResTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attn_res`."""
    tiles = tiles or AttnResTiles()
    operands = [count.reshape(1), blocks, part, query_norm, query_proj, norm]
    operands += [] if delta is None else [delta]

    def run(*operands, narrow):
        return _both_launches(*operands, eps=eps, tiles=tiles, narrow=narrow, interpret=interpret)

    return launch.by_platform(
        *operands,
        cuda=functools.partial(run, narrow=8),
        portable=functools.partial(run, narrow=16),
        interpret=interpret,
    )


def _both_launches(
    count, blocks, part, query_norm, query_proj, norm, *delta, eps, tiles, narrow, interpret
):
    rows, depth = part.shape
    side = max(narrow, pl.next_power_of_2(blocks.shape[0]))
    pieces = pl.cdiv(depth, tiles.piece)
    table = launch.launch(
        functools.partial(_products_kernel, piece=tiles.piece, side=side),
        count,
        blocks,
        part,
        query_norm,
        query_proj,
        *delta,
        name=PRODUCTS_NAME,
        grid=(rows, pieces),
        out_shape=jax.ShapeDtypeStruct((rows, pieces, 2 * side + 1, side), jnp.float32),
        interpret=interpret,
        num_warps=1,
    )
    return launch.launch(
        functools.partial(_mix_kernel, columns=tiles.columns, eps=eps),
        count,
        blocks,
        part,
        norm,
        table,
        *delta,
        name=MIX_NAME,
        grid=(rows, pl.cdiv(depth, tiles.columns)),
        out_shape=(jax.ShapeDtypeStruct(part.shape, part.dtype),) * 2,
        interpret=interpret,
        num_warps=tiles.warps,
    )


def _products_kernel(
    count_ref,  # i32[1]
    blocks_ref,  # [M, W, D]
    part_ref,  # [W, D]
    query_norm_ref,  # [D]
    query_proj_ref,  # [D]
    *refs,  # delta [W, D] if given; out: f32[W, pieces, 2 side + 1, side]
    piece: int,
    side: int,
):
    """Products of the vectors [blocks; second half] with the blocks, and of the part with both.

    The second half is the partial sum and the query as a high and a low piece, which are exactly
    the product of two bf16: 16 bits.
    """
    table_ref = refs[-1]
    block_count, _, depth = blocks_ref.shape
    dtype = part_ref.dtype
    row, place = pl.program_id(0), pl.program_id(1)
    line = jnp.arange(side, dtype=jnp.int32)
    live = line < jnp.minimum(count_ref[0], block_count)
    first_half = (jnp.arange(2, dtype=jnp.int32) == 0)[:, None, None]
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    def in_core_order(vectors):
        return core_order(vectors.reshape(-1, LANES, WORD))

    def load(block):
        at = place * piece + block * GROUP + jnp.arange(GROUP, dtype=jnp.int32)
        inside = jnp.broadcast_to((at < depth)[None, :], (side, GROUP))

        def vector(ref, *lead):  # the same in every line
            index = tuple(jnp.broadcast_to(axis, (side, GROUP)) for axis in (*lead, at[None, :]))
            mask = None if depth % piece == 0 else inside
            other = None if mask is None else 0.0
            return launch.load(ref.at[index], mask=mask, other=other).astype(jnp.float32)

        mask = inside & live[:, None]
        index = launch.mesh(jnp.minimum(line, block_count - 1), row, at)
        part = vector(part_ref, row)
        if len(refs) == 2:
            part += vector(refs[0], row)
        values = launch.load(blocks_ref.at[index], mask=mask, other=0.0)
        return values, part, vector(query_norm_ref), vector(query_proj_ref)

    loaded = [load(block) for block in range(piece // GROUP)]
    products = own = jnp.zeros((2 * side, side), jnp.float32)
    for values, part, query_norm, query_proj in loaded:
        query = query_norm * query_proj
        low = query - query.astype(dtype).astype(jnp.float32)
        query = jnp.where((line == LOW)[:, None], low, query)
        query = jnp.where((line <= LOW)[:, None], query, 0.0)
        second = jnp.where((line == PART)[:, None], part, query).astype(dtype)
        both = jnp.where(first_half, values[None], second[None]).reshape(2 * side, GROUP)
        both = in_core_order(both)
        products += multiply(both, in_core_order(values))
        own += multiply(both, in_core_order(second))
    lines = jnp.arange(2 * side, dtype=jnp.int32)
    launch.store(table_ref.at[launch.mesh(row, place, lines, line)], products)
    # Of the second table only the partial sum's line is wanted.
    lines = jnp.where(lines == side + PART, 2 * side, 0)
    wanted = jnp.broadcast_to((lines > 0)[:, None], own.shape)
    launch.store(table_ref.at[launch.mesh(row, place, lines, line)], own, mask=wanted)


def _mix_kernel(
    count_ref,  # i32[1]
    blocks_ref,  # [M, W, D]
    part_ref,  # [W, D]
    norm_ref,  # [D]
    table_ref,  # f32[W, pieces, 2 side + 1, side]
    *refs,  # delta [W, D] if given; out: normed [W, D], part [W, D]
    columns: int,
    eps: float,
):
    normed_ref, new_part_ref = refs[-2:]
    block_count, _, depth = blocks_ref.shape
    side = table_ref.shape[3]
    row, count = pl.program_id(0), jnp.minimum(count_ref[0], block_count)
    at = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = at < depth

    def vector(ref, *lead):
        loaded = launch.load(ref.at[launch.mesh(*lead, at)], mask=inside, other=0.0)
        return loaded.astype(jnp.float32)

    block = jnp.arange(pl.next_power_of_2(block_count), dtype=jnp.int32)
    values = launch.load(
        blocks_ref.at[launch.mesh(block, row, at)],
        mask=(block < count)[:, None] & inside[None, :],
        other=0.0,
    )
    part = vector(part_ref, row)
    if len(refs) == 3:
        part += vector(refs[0], row)
    part = part.astype(part_ref.dtype)
    norm = vector(norm_ref)
    weights, part_weight, square = _weights(table_ref, row, count, depth, eps)

    line = jnp.arange(side, dtype=jnp.int32)
    weight = jnp.zeros(block.size, jnp.float32)
    for index in range(block_count):  # one by one: the values would follow another layout
        weight = jnp.where(block == index, jnp.sum(jnp.where(line == index, weights, 0.0)), weight)
    mix = part.astype(jnp.float32) * part_weight
    mix += jnp.sum(values.astype(jnp.float32) * weight[:, None], axis=0)
    launch.store(new_part_ref.at[launch.mesh(row, at)], part, mask=inside)
    normed = mix * lax.rsqrt(square / depth + eps) * norm
    launch.store(normed_ref.at[launch.mesh(row, at)], normed.astype(normed_ref.dtype), mask=inside)


def _weights(table_ref, row, count, depth, eps):
    """Softmax weights f32[side] of the blocks, the partial sum's, and the mix's sum of squares."""
    _, pieces, lines, side = table_ref.shape
    line = jnp.arange(lines - 1, dtype=jnp.int32)
    column = jnp.arange(side, dtype=jnp.int32)

    piece = jnp.arange(pl.next_power_of_2(pieces), dtype=jnp.int32)

    def total(at_line):
        place = launch.mesh(row, jnp.minimum(piece, pieces - 1), at_line, column)
        loaded = launch.load(table_ref.at[place])
        there = (piece < pieces).reshape(-1, *(1 for _ in loaded.shape[1:]))
        return jnp.sum(jnp.where(there, loaded, 0.0), axis=0)

    products, own = total(line), total(jnp.int32(lines - 1))
    line_of, column_of = line[:, None], column[None, :]

    def pick(wanted):  # f32[side]: the products of some lines
        return jnp.sum(jnp.where(wanted, products, 0.0), axis=0)

    def pick_own(*wanted):
        return sum(jnp.sum(jnp.where(column == index, own, 0.0)) for index in wanted)

    squares = pick(line_of == column_of)
    queried = pick((line_of == side + HIGH) | (line_of == side + LOW))
    with_part = pick(line_of == side + PART)
    part_square, part_queried = pick_own(PART), pick_own(HIGH, LOW)

    live = column < count
    scores = jnp.where(live, queried * lax.rsqrt(squares / depth + eps), -jnp.inf)
    part_score = part_queried * lax.rsqrt(part_square / depth + eps)
    top = jnp.maximum(jnp.max(scores), part_score)
    weights = jnp.where(live, jnp.exp(scores - top), 0.0)
    part_weight = jnp.exp(part_score - top)
    scale = 1.0 / (jnp.sum(weights) + part_weight)
    weights, part_weight = weights * scale, part_weight * scale

    of_line = jnp.sum(jnp.where(line_of == column_of, weights[None, :], 0.0), axis=1)
    square = jnp.sum(products * of_line[:, None] * weights[None, :])
    square += part_weight * (2.0 * jnp.sum(weights * with_part) + part_weight * part_square)
    return weights, part_weight, square
