"""The walk of a KDA state over its chunks, and the norm of what it puts out, as Pallas kernels.

    D = U - W S,   O = (Q exp(G)) S + A D,   S <- diag(exp(G_last)) S + Kd^T D

A program walks a strip of a head's values over a segment of the chunks. It keeps S transposed: the
products' results then have the layout of the next ones' left operands, and stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_prefill_chunk_pallas import QUERY, TO_END, WEIGHT, ChunkParts
from pallas_kernels.kda_prefill_pairs_pallas import dot
from pallas_kernels.kda_rows_pallas import read
from pallas_kernels.kda_types import KdaPending


@dataclass(frozen=True)
class _Segment:
    """The chunks of a program: an even share of its request's."""

    request: jax.Array  # i32[]
    head: jax.Array  # i32[]
    number: jax.Array  # i32[]
    begin: jax.Array  # i32[]
    stop: jax.Array  # i32[]
    chunks: jax.Array  # i32[] of the request, at least one


def _segment(lengths, size: int, heads: int, segments: int) -> _Segment:
    """From grid (strips, segments * heads, requests)."""
    request = pl.program_id(2)
    number, head = lax.div(pl.program_id(1), heads), lax.rem(pl.program_id(1), heads)
    # At least one chunk, without rows if need be: a loop that might not run makes NVIDIA's
    # assembler wait for each matrix instruction in turn.
    chunks = jnp.maximum((lengths[request] + size - 1) // size, 1)
    share = (chunks + segments - 1) // segments
    begin = jnp.minimum(number * share, chunks)
    return _Segment(request, head, number, begin, jnp.minimum(begin + share, chunks), chunks)


def _walk(parts: ChunkParts, segment: _Segment, state, update_of, put) -> jax.Array:
    """Take `state` [strip, K] over the segment's chunks.

    update_of(chunk): [strip, C]; put(chunk, held, delta) makes the output.
    """
    dtype, keys = parts.rows.dtype, pl.ds(0, parts.shrink.shape[3])
    exact = dtype == jnp.float32

    def shrink_of(chunk):
        return parts.shrink[segment.request, segment.head, chunk]

    def walk(chunk, carry):
        state, shrink = carry
        # On its way while this chunk computes.
        shrink_next = shrink_of(jnp.minimum(chunk + 1, segment.chunks - 1))
        at = (segment.request, segment.head, chunk)
        held = state.astype(dtype)
        seen = dot(held, parts.rows[(*at, WEIGHT, slice(None), keys)], (1, 1), exact)
        delta = (update_of(chunk) - seen).astype(dtype)
        put(chunk, held, delta)
        grown = dot(delta, parts.rows[(*at, TO_END, slice(None), keys)], (1, 0), exact)
        return state * shrink[None, :] + grown, shrink_next

    def loop(state):
        stop = jnp.maximum(segment.stop, segment.begin + 1)
        return lax.fori_loop(segment.begin, stop, walk, (state, shrink_of(segment.begin)))[0]

    return lax.cond(segment.begin < segment.stop, loop, lambda same: same, state)


def _start(pending, slots, starts, replayed, fresh, pool, segment: _Segment, here) -> jax.Array:
    """The slot's state with its accepted rows replayed: f32[strip, K]."""
    request, head = segment.request, segment.head
    slot = slots[request]
    state = jnp.where(fresh[request], 0.0, pool[slot, head, here, :])

    def replay(row, state):
        at = (starts[request] - replayed[request] + row) & (pending.key.shape[1] - 1)
        key = pending.key[slot, at, head, :].astype(jnp.float32)[None, :]
        state *= jnp.exp(pending.decay[slot, at, head, :])[None, :]
        return state + pending.update[slot, at, head, here][:, None] * key

    return lax.fori_loop(0, replayed[request], replay, state)


def leap_kernel(
    parts: ChunkParts,
    pending: KdaPending,
    slots,  # i32[B]
    starts,  # i32[B]
    replayed,  # i32[B]
    fresh,  # bool[B]
    lengths,  # i32[B]
    pool,  # f32[S, H, V, K]
    leaps,  # f32[B, H, segments, V + K, K]
    *,
    strip: int,
):
    """What each segment but the last does to any state: S <- S M + R, R above M.

    The first one's R is its end from the slot's state, which itself takes the last segment's place.
    """
    heads, segments, depth, key_dim = leaps.shape[1:]
    value_dim = depth - key_dim
    segment = _segment(lengths, parts.rows.shape[4], heads, segments)
    first = pl.program_id(0) * strip
    here = pl.ds(first, strip)
    at = (segment.request, segment.head)
    row = lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + (first - value_dim)
    lane = lax.broadcasted_iota(jnp.int32, (1, key_dim), 1)

    def walk_from(state, update_of):
        end = _walk(parts, segment, state, update_of, lambda *unused: None)
        leaps[(*at, segment.number, here, slice(None))] = end

    def update_of(chunk):
        return parts.update[(*at, chunk, here, slice(None))].astype(jnp.float32)

    def values():
        value_here = pl.ds(first, strip)
        state = _start(pending, slots, starts, replayed, fresh, pool, segment, value_here)
        is_first = segment.number == 0
        walk_from(jnp.where(is_first, state, 0.0), update_of)

        @pl.when(is_first)
        def _():
            leaps[(*at, segments - 1, here, slice(None))] = state

    def keys():
        walk_from(jnp.where(row == lane, 1.0, 0.0), lambda chunk: 0.0)

    lax.cond(first < value_dim, values, keys)


def _product(state: jax.Array, matrix: jax.Array, exact: bool) -> jax.Array:
    """f32[strip, K] times f32[K, K], by products of halves if not exact."""
    if exact:
        return dot(state, matrix, (1, 0), True)
    high, wide = state.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    low = (state - high.astype(jnp.float32)).astype(jnp.bfloat16)
    rest = (matrix - wide.astype(jnp.float32)).astype(jnp.bfloat16)
    result = dot(high, wide, (1, 0), False) + dot(high, rest, (1, 0), False)
    return result + dot(low, wide, (1, 0), False)


def walk_kernel(
    parts: ChunkParts,
    pending: KdaPending,
    slots,  # i32[B]
    starts,  # i32[B]
    replayed,  # i32[B] pending rows to commit first
    fresh,  # bool[B]
    lengths,  # i32[B]
    leaps,  # f32[B, H, segments, V + K, K], None if there is one segment
    pool,  # f32[S, H, V, K]
    outs,  # [B, H, N, V, C] before gate and norm, transposed
    pool_after,  # f32[S, H, V, K] the pool itself
    *,
    strip: int,
):
    """Replay the accepted rows, then walk the chunks; the null slot's state stays as it is."""
    heads, segments = pool.shape[1], 1 if leaps is None else leaps.shape[2]
    segment = _segment(lengths, parts.rows.shape[4], heads, segments)
    at = (segment.request, segment.head)
    here = pl.ds(pl.program_id(0) * strip, strip)
    dtype = outs.dtype
    if leaps is None:
        state = _start(pending, slots, starts, replayed, fresh, pool, segment, here)
    else:
        # The slot's state is read there: the pool may be written already.
        key_rows = pl.ds(leaps.shape[3] - leaps.shape[4], leaps.shape[4])
        from_slot = segment.number == 0
        place = jnp.where(from_slot, segments - 1, jnp.zeros_like(segment.number))
        state = leaps[(*at, place, here, slice(None))]

        def leap(number, state):
            moved = _product(
                state, leaps[(*at, number, key_rows, slice(None))], dtype == jnp.float32
            )
            return moved + leaps[(*at, number, here, slice(None))]

        state = lax.fori_loop(1, segment.number, leap, state)

    def update_of(chunk):
        return parts.update[(*at, chunk, here, slice(None))].astype(jnp.float32)

    def put(chunk, held, delta):
        exact = dtype == jnp.float32
        query = parts.rows[(*at, chunk, QUERY, slice(None), pl.ds(0, pool.shape[3]))]
        out = dot(held, query, (1, 1), exact)
        out += dot(delta, parts.mix[(*at, chunk)], (1, 1), exact)
        outs[(*at, chunk, here, slice(None))] = out.astype(dtype)

    state = _walk(parts, segment, state, update_of, put)

    @pl.when((segment.begin < segment.stop) & (segment.stop == segment.chunks))
    def _():
        pool_after[slots[segment.request], segment.head, here, :] = state


def output_kernel(
    outs,  # [B, H, N, V, C]
    gate,  # [B, T, H*V]
    o_norm,  # f32[V]
    lengths,  # i32[B]
    out_ref,  # [B, T, H*V]
    broken_ref,  # bool[B, H, programs] a row that counts is not finite
    *,
    rows: int,  # of a program
    norm_eps: float,
    maths: Maths,
):
    """Gate and norm rows; zeros beyond the request's length."""
    part, head, request = (pl.program_id(axis) for axis in range(3))
    value_dim, size = outs.shape[3:]
    time = part * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    lane = lax.broadcasted_iota(jnp.int32, (1, value_dim), 1)
    place = (request, time, head * value_dim + lane)
    inside, length = time < out_ref.shape[1], lengths[request]

    def work():
        valid = time < length
        chunk, row = lax.div(time, size), lax.rem(time, size)
        out = read(outs, (request, head, chunk, lane, row), valid)
        scale = maths.rsqrt(jnp.sum(out * out, axis=1, keepdims=True) / value_dim + norm_eps)
        out *= scale * maths.sigmoid(read(gate, place, valid)) * read(o_norm, (lane,))
        out = jnp.where(valid, out, 0.0)
        launch.store(out_ref.at[place], out.astype(out_ref.dtype), mask=inside)
        broken = jnp.sum(jnp.where(out * 0.0 == 0.0, 0.0, 1.0)) > 0
        broken_ref[request, head, part] = broken

    def leave():
        zeros = jnp.zeros((rows, value_dim), out_ref.dtype)
        launch.store(out_ref.at[place], zeros, mask=inside)
        broken_ref[request, head, part] = jnp.zeros((), bool)

    lax.cond(part * rows < length, work, leave)
