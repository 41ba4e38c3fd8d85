"""What a chunk of KDA rows does to any state, as two Pallas kernels.

Convolution and normalization of the rows, a program for each chunk, head and one of q, k and v;
then a program for each chunk and head. With G the log decay summed over the rows of the chunk up to
each one:

    L_ij = k_i . exp(G_i - G_j) k_j  (j < i),   A_ij = q_i . exp(G_i - G_j) k_j  (j <= i)
    T = (I + diag(beta) L)^-1 diag(beta),  W = T (K exp(G)),  U = T V,  Kd = K exp(G_last - G).

What is done several times is a loop: a program runs its code once, and has to fetch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kda_math import LOG2_E, Maths
from pallas_kernels.kda_prefill_pairs_pallas import (
    STRONGEST_BOUND,
    dot,
    pair_products,
    row_sums,
    unit_lower_inverse,
)
from pallas_kernels.kda_prefill_reference import STRONGEST_DECAY
from pallas_kernels.kda_rows_pallas import log_decay, read, read_raw
from pallas_kernels.kda_types import TAPS, KdaRows, KdaWeights
from pallas_kernels.norm import L2_EPS

QUERY, WEIGHT, TO_END = range(3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkParts:
    """What the walk reads of N chunks of C rows, in the compute dtype.

    D is the larger of K and V: before, `rows` holds queries, keys and values.
    """

    rows: jax.Array  # [B, H, N, 3 C, D] Q exp(G), W, Kd; up to K
    update: jax.Array  # [B, H, N, V, C] U, transposed
    mix: jax.Array  # [B, H, N, C, C] A
    shrink: jax.Array  # f32[B, H, N, K] exp(G_last)


@dataclass(frozen=True)
class _Place:
    """The rows of a program."""

    request: jax.Array  # i32[]
    chunk: jax.Array  # i32[]
    head: jax.Array  # i32[]
    length: jax.Array  # i32[] rows of the request
    row: jax.Array  # i32[C, 1]
    column: jax.Array  # i32[1, C]

    @property
    def first(self) -> jax.Array:
        return self.chunk * self.row.shape[0]

    @property
    def time(self) -> jax.Array:
        return self.first + self.row

    @property
    def has_rows(self) -> jax.Array:
        """Whether the chunk counts: the first one always does, if only to be found empty."""
        return (self.chunk == 0) | (self.first < self.length)

    @property
    def valid(self) -> jax.Array:
        return self.time < self.length


def _place(request, chunk, head, lengths, size: int) -> _Place:
    row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    column = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return _Place(request, chunk, head, lengths[request], row, column)


def _convolve(
    qkv, window, conv, place: _Place, columns: jax.Array, inside: jax.Array | None, maths: Maths
) -> jax.Array:
    """SiLU of the short convolution at `columns` i32[1, X]: f32[C, X], zero in padding rows.

    Also zero outside of bool[1, X] `inside`, if it is given.
    """
    valid = place.valid if inside is None else place.valid & inside
    sources = [place.time + (tap - TAPS + 1) for tap in range(TAPS)]
    weights = [read(conv, (jnp.full((1, 1), tap), columns), inside) for tap in range(TAPS)]

    def add(total, source, weight, ref, offset, mask):
        taps = read_raw(ref, (place.request, source + offset, columns), mask)
        return maths.fma_bf16(taps, weight, total)

    def add_window(total):
        for source, weight in zip(sources[:-1], weights, strict=False):
            early = valid & (source < 0)
            total = add(total, source, weight, window, TAPS - 1, early)
        return total

    total = jnp.zeros((place.row.shape[0], columns.shape[1]), jnp.float32)
    for source, weight in zip(sources, weights, strict=True):
        total = add(total, source, weight, qkv, 0, valid & (source >= 0))
    total = lax.cond(place.chunk == 0, add_window, lambda same: same, total)
    return total * maths.sigmoid(total)


def _log2_decay(
    decay, weights, place: _Place, columns, bound: float | None, maths: Maths
) -> jax.Array:
    """The rows' gates, zero in padding rows: f32[C, K]."""
    logits = read(decay, (place.request, place.time, columns), place.valid)
    bias, a_log = read(weights.dt_bias, (columns,)), weights.a_log[place.head]
    if bound is None:
        gate = log_decay(logits, bias, a_log, None, maths)
        gate = jnp.maximum(LOG2_E * gate, STRONGEST_DECAY * LOG2_E)
    else:
        gate = bound * LOG2_E * maths.sigmoid(jnp.exp(a_log) * (logits + bias))
    return jnp.where(place.valid, gate, 0.0)


def project_kernel(
    rows: KdaRows,
    window,  # [B, 3, C] the rows before them
    weights: KdaWeights,
    lengths,  # i32[B]
    projected,  # [B, H, N, 3 C, D]
    *,
    widths: tuple[int, int],  # K, V
    maths: Maths,
):
    """Convolve queries, keys or values of a chunk, and normalize the first two."""
    chunk, request = pl.program_id(0), pl.program_id(2)
    kind = lax.rem(pl.program_id(1), jnp.int32(3))
    head = lax.div(pl.program_id(1), jnp.int32(3))
    heads, size, depth = projected.shape[1], projected.shape[3] // 3, projected.shape[4]
    key_dim, value_dim = widths
    place = _place(request, chunk, head, lengths, size)

    @pl.when(place.has_rows)
    def _():
        lane = lax.broadcasted_iota(jnp.int32, (1, depth), 1)
        is_value = (kind == 2).astype(jnp.int32)
        width = key_dim + is_value * (value_dim - key_dim)
        inside = None if key_dim == value_dim else lane < width
        first = kind * (heads * key_dim) + head * width
        mixed = _convolve(rows.qkv, window, weights.conv, place, first + lane, inside, maths)
        scale = maths.rsqrt(jnp.sum(mixed * mixed, axis=1, keepdims=True) + L2_EPS)
        scale *= 1.0 + (kind == 0).astype(jnp.float32) * (key_dim**-0.5 - 1.0)
        mixed *= jnp.where(kind == 2, jnp.ones_like(scale), scale)
        at = (request, head, chunk, kind * size + place.row, lane)
        launch.store(projected.at[at], mixed.astype(projected.dtype))


def chunk_kernel(
    rows: KdaRows,
    weights: KdaWeights,
    lengths,  # i32[B]
    projected,  # [B, H, N, 3 C, D] the memory of parts.rows
    parts,  # ChunkParts
    *,
    lower_bound: float | None,
    maths: Maths,
    interpret: bool,
):
    """See the module; chunks beyond the first that hold no row are left out."""
    del projected
    chunk, head, request = (pl.program_id(axis) for axis in range(3))
    size, key_dim, value_dim = parts.mix.shape[3], parts.shrink.shape[3], parts.update.shape[3]
    dtype = parts.rows.dtype
    exact = dtype == jnp.float32
    place = _place(request, chunk, head, lengths, size)
    row, column = place.row, place.column
    lane = lax.broadcasted_iota(jnp.int32, (1, key_dim), 1)
    at = (request, head, chunk)

    def tile(kind, width):
        across = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        return parts.rows.at[(*at, kind * size + row, across)]

    def wait():
        if not interpret:
            launch.barrier()

    def read_tile(kind):
        return launch.load(tile(kind, key_dim)).astype(jnp.float32)

    @pl.when(place.has_rows)
    def _():
        decay = _log2_decay(rows.decay, weights, place, head * key_dim + lane, lower_bound, maths)
        decay = decay.astype(jnp.float32 if exact else jnp.float16)
        bounded = lower_bound is not None and lower_bound >= STRONGEST_BOUND
        key_pairs, query_pairs = pair_products(
            partial(read_tile, QUERY), partial(read_tile, WEIGHT), decay, row, column,
            maths=maths, bounded=bounded, dtype=dtype,
        )  # fmt: skip
        launch.store(parts.mix.at[(*at, row, column)], query_pairs.astype(dtype))

        beta_at = (request, place.time, head)
        beta = jnp.where(place.valid, maths.sigmoid(read(rows.beta, beta_at, place.valid)), 0.0)
        time = place.first + column
        across = time < place.length
        beta_across = maths.sigmoid(read(rows.beta, (request, time, head), across))
        inverse = unit_lower_inverse(beta * key_pairs, row, column, exact=exact)
        inverse = (inverse * jnp.where(across, beta_across, 0.0)).astype(dtype)
        update = dot(launch.load(tile(TO_END, value_dim)), inverse, (0, 1), exact)
        down = lax.broadcasted_iota(jnp.int32, (value_dim, 1), 0)
        launch.store(parts.update.at[(*at, down, column)], update.astype(dtype))

        total = row_sums(decay, jnp.where(column <= row, 1.0, 0.0))
        grown = maths.exp2(total)
        faded_query, key = read_tile(QUERY) * grown, read_tile(WEIGHT)
        weight = dot(inverse, (key * grown).astype(dtype), (1, 0), exact)
        to_end = key * maths.exp2(row_sums(decay, jnp.where(column > row, 1.0, 0.0)))
        wait()
        launch.store(tile(QUERY, key_dim), faded_query.astype(dtype))
        launch.store(tile(WEIGHT, key_dim), weight.astype(dtype))
        launch.store(tile(TO_END, key_dim), to_end.astype(dtype))
        last = jnp.broadcast_to(row == size - 1, (size, key_dim))
        launch.store(parts.shrink.at[(*at, row * 0 + lane)], grown, mask=last)
