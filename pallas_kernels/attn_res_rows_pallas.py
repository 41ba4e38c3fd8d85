"""Attention residuals of many rows on Triton: one launch that reads every vector once.

A program has a row. All vectors of a row do not fit into registers, and a block's score needs the
whole block: so blocks are mixed one by one, each scaling what was mixed before by how much higher
its score is (online softmax), while the next one is under way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch

ROWS_NAME = "attn_res_rows"
# With 8 warps of 32 lanes a thread has 28 columns of each vector and 128 registers, so that two
# programs share a multiprocessor and one loads while the other one adds up.
PIECE = 1024  # columns loaded at once: 7168 is no power of two
WARPS = 8


def attn_res_rows_pallas(
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
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attn_res`."""
    query = query_norm.astype(jnp.float32) * query_proj.astype(jnp.float32)
    operands = [count.reshape(1), blocks, part, query, norm]
    operands += [] if delta is None else [delta]

    def run(*operands, warps, multiply_add):
        return launch.launch(
            functools.partial(_rows_kernel, multiply_add=multiply_add, eps=eps),
            *operands,
            name=ROWS_NAME,
            grid=part.shape[:1],
            out_shape=(jax.ShapeDtypeStruct(part.shape, part.dtype),) * 2,
            interpret=interpret,
            num_warps=warps,
        )

    return launch.by_platform(
        *operands,
        cuda=functools.partial(run, warps=WARPS, multiply_add=launch.multiply_add),
        portable=functools.partial(  # warps of 64 lanes
            run, warps=WARPS // 2, multiply_add=lambda one, other, add: one * other + add
        ),
        interpret=interpret,
    )


def _rows_kernel(
    count_ref,  # i32[1]
    blocks_ref,  # [M, W, D]
    part_ref,  # [W, D]
    query_ref,  # f32[D]
    norm_ref,  # [D]
    *refs,  # delta [W, D] if given; out: normed [W, D], part [W, D]
    multiply_add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    eps: float,
):
    normed_ref, new_part_ref = refs[-2:]
    block_count, _, depth = blocks_ref.shape
    row, count = pl.program_id(0), jnp.minimum(count_ref[0], block_count)
    piece = min(PIECE, pl.next_power_of_2(depth))
    places = [start + jnp.arange(piece, dtype=jnp.int32) for start in range(0, depth, piece)]
    inside = [None if depth % piece == 0 else at < depth for at in places]

    def load(ref, *lead, live=None):  # a vector in pieces; undefined unless `live`
        pieces = []
        for at, mask in zip(places, inside, strict=True):
            other = None if mask is None else 0.0
            if live is not None:
                mask = jnp.broadcast_to(live if mask is None else live & mask, at.shape)
            pieces.append(launch.load(ref.at[launch.mesh(*lead, at)], mask=mask, other=other))
        return pieces

    def load_block(index):
        return load(blocks_ref, jnp.minimum(index, block_count - 1), row, live=index < count)

    def store(ref, vector):
        for at, mask, values in zip(places, inside, vector, strict=True):
            launch.store(ref.at[launch.mesh(row, at)], values.astype(ref.dtype), mask=mask)

    def product(one, other):  # still to be summed
        sums = one[0] * other[0]
        for left, right in zip(one[1:], other[1:], strict=True):
            sums = multiply_add(left, right, sums)
        return sums

    def score(vector):
        queried, square = _two_sums(product(vector, query), product(vector, vector))
        return queried * lax.rsqrt(square / depth + eps)

    query = load(query_ref)
    part = load(part_ref, row)
    if len(refs) == 3:
        pairs = zip(_wide(part), _wide(load(refs[0], row)), strict=True)
        part = [(values + delta).astype(part_ref.dtype) for values, delta in pairs]
    first = load_block(jnp.int32(0))
    store(new_part_ref, part)

    def mixed(index, carry):
        block, top, total, mix = carry
        following = load_block(index + 1)
        values = _wide(block)
        found = score(values)
        higher = jnp.maximum(top, found)
        scale, weight = jnp.exp(top - higher), jnp.exp(found - higher)
        shares = [jnp.broadcast_to(weight, piece.shape) for piece in mix]
        mix = list(map(multiply_add, values, shares, [piece * scale for piece in mix]))
        return following, higher, total * scale + weight, mix

    mix = _wide(part)
    top = score(mix)
    total = jnp.exp(top - top)  # 1 unless NaN: the sum of the weights, of which the highest is 1
    _, top, total, mix = lax.fori_loop(0, count, mixed, (first, top, total, mix))

    share = 1.0 / total
    square = jnp.sum(product(mix, mix)) * share * share
    share *= lax.rsqrt(square / depth + eps)
    pairs = zip(mix, _wide(load(norm_ref)), strict=True)
    store(normed_ref, [values * share * norm for values, norm in pairs])


def _wide(vector: list[jax.Array]) -> list[jax.Array]:
    return [values.astype(jnp.float32) for values in vector]


def _two_sums(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of two pieces, of one reduction: its barriers are what takes time."""
    sums = jnp.sum(jnp.stack([one, other], axis=-1), axis=0)
    place = jnp.arange(2, dtype=jnp.int32)
    return jnp.sum(jnp.where(place == 0, sums, 0.0)), jnp.sum(jnp.where(place == 1, sums, 0.0))
