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


def _walk(parts: ChunkParts, segment: _Segment, state, update_of, put=None) -> jax.Array:
    """Take `state` [strip, K] over the segment's chunks.

    update_of(chunk): [strip, C]; put(chunk, from_state, delta) makes the output, if any is wanted,
    of Q exp(G) times the state.
    """
    dtype, keys = parts.rows.dtype, pl.ds(0, parts.shrink.shape[3])
    exact, size = dtype == jnp.float32, parts.mix.shape[3]

    def rows_of(chunk, kind, kinds=1):
        rows = pl.ds(kind * size, kinds * size)
        return parts.rows[segment.request, segment.head, chunk, rows, keys]

    def shrink_of(chunk):
        return parts.shrink[segment.request, segment.head, chunk]

    def walk(chunk, carry):
        state, shrink = carry
        # On its way while this chunk computes.
        shrink_next = shrink_of(jnp.minimum(chunk + 1, segment.chunks - 1))
        held = state.astype(dtype)
        if put is None:
            seen = dot(held, rows_of(chunk, WEIGHT), (1, 1), exact)
            delta = (update_of(chunk) - seen).astype(dtype)
        else:
            both = dot(held, rows_of(chunk, QUERY, 2), (1, 1), exact)
            from_state, seen = lax.split(both, (size, size), axis=1)
            delta = (update_of(chunk) - seen).astype(dtype)
            put(chunk, from_state, delta)
        grown = dot(delta, rows_of(chunk, TO_END), (1, 0), exact)
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaps:
    """What each segment but the last does to any state: S <- S M + R."""

    # f32[B, H, segments, V, K] R; the first segment's is its end from the slot's state, which
    # itself takes the last one's place.
    ends: jax.Array
    matrices: jax.Array  # [B, H, segments - 1, halves, K, K] M, a sum of numbers of the rows' dtype


def _halves(matrix: jax.Array, dtype, count: int) -> list[jax.Array]:
    """`count` arrays of `dtype` whose sum is close to `matrix`."""
    halves = []
    for _ in range(count):
        halves.append(matrix.astype(dtype))
        matrix = matrix - halves[-1].astype(jnp.float32)
    return halves


def leap_kernel(
    parts: ChunkParts,
    pending: KdaPending,
    slots,  # i32[B]
    starts,  # i32[B]
    replayed,  # i32[B]
    fresh,  # bool[B]
    lengths,  # i32[B]
    pool,  # f32[S, H, V, K]
    leaps: Leaps,
    *,
    strip: int,
):
    """Take over each segment but the last its own rows, and an identity."""
    heads, segments, value_dim, key_dim = leaps.ends.shape[1:]
    segment = _segment(lengths, parts.mix.shape[3], heads, segments)
    first = pl.program_id(0) * strip
    at = (segment.request, segment.head)
    is_value = first < value_dim
    from_slot = is_value & (segment.number == 0)
    here = pl.ds(jnp.where(is_value, first, 0), strip)

    def start():
        return _start(pending, slots, starts, replayed, fresh, pool, segment, here)

    def start_from_none():
        row = lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + (first - value_dim)
        lane = lax.broadcasted_iota(jnp.int32, (1, key_dim), 1)
        return jnp.where(row == lane, 1.0, 0.0)  # zeros but for keys

    def update_of(chunk):
        update = parts.update[(*at, chunk, here, slice(None))].astype(jnp.float32)
        return jnp.where(is_value, update, 0.0)

    state = lax.cond(from_slot, start, start_from_none)

    @pl.when(from_slot)
    def _():
        leaps.ends[(*at, segments - 1, here, slice(None))] = state

    end = _walk(parts, segment, state, update_of)

    def keep_values():
        leaps.ends[(*at, segment.number, here, slice(None))] = end

    def keep_keys():
        here = pl.ds(first - value_dim, strip)
        dtype, count = leaps.matrices.dtype, leaps.matrices.shape[3]
        for number, half in enumerate(_halves(end, dtype, count)):
            leaps.matrices[(*at, segment.number, number, here, slice(None))] = half

    lax.cond(is_value, keep_values, keep_keys)


def borders_kernel(
    ends,  # f32[B, H, segments, V, K] the memory of states
    matrices,  # [B, H, segments - 1, halves, K, K]
    states,  # f32[B, H, segments, V, K]
    *,
    strip: int,
):
    """Make the ends of `Leaps` the states at the ends of the segments."""
    del ends
    head, request = pl.program_id(1), pl.program_id(2)
    here, count = pl.ds(pl.program_id(0) * strip, strip), matrices.shape[3]
    dtype, at = matrices.dtype, (request, head)
    exact = dtype == jnp.float32

    def leap(number, state):
        moved = states[(*at, number, here, slice(None))]
        for place, half in enumerate(_halves(state, dtype, count)):
            for other in range(count - place):
                matrix = matrices[(*at, number, other, slice(None), slice(None))]
                moved += dot(half, matrix, (1, 0), exact)
        states[(*at, number, here, slice(None))] = moved
        return moved

    lax.fori_loop(1, matrices.shape[2], leap, states[(*at, 0, here, slice(None))])


def walk_kernel(
    parts: ChunkParts,
    pending: KdaPending,
    slots,  # i32[B]
    starts,  # i32[B]
    replayed,  # i32[B] pending rows to commit first
    fresh,  # bool[B]
    lengths,  # i32[B]
    states,  # f32[B, H, segments, V, K] at the segments' ends, None if there is one segment
    pool,  # f32[S, H, V, K]
    outs,  # [B, H, N, V, C] before gate and norm, transposed
    pool_after,  # f32[S, H, V, K] the pool itself
    *,
    strip: int,
):
    """Replay the accepted rows, then walk the chunks; the null slot's state stays as it is."""
    heads, segments = pool.shape[1], 1 if states is None else states.shape[2]
    segment = _segment(lengths, parts.mix.shape[3], heads, segments)
    at = (segment.request, segment.head)
    here = pl.ds(pl.program_id(0) * strip, strip)
    dtype = outs.dtype
    if states is None:
        state = _start(pending, slots, starts, replayed, fresh, pool, segment, here)
    else:
        # The slot's state is read in the last one's place: the pool may be written already.
        before = jnp.where(segment.number == 0, segments, segment.number) - 1
        state = states[(*at, before, here, slice(None))]

    def update_of(chunk):
        return parts.update[(*at, chunk, here, slice(None))].astype(jnp.float32)

    def put(chunk, from_state, delta):
        mix = parts.mix[(*at, chunk)]
        out = from_state + dot(delta, mix, (1, 1), dtype == jnp.float32)
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
