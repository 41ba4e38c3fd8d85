"""KDA decode of all new rows of a request at once: the WY form of a chunk, in two kernels.

With S the state after the replay, G_t the log decay summed over the new rows up to t, and i <= t:

    L_ti = k_t . exp(G_t - G_i) k_i  (i < t),   A_ti = q_t . exp(G_t - G_i) k_i
    U = (I + diag(beta) L)^-1 diag(beta) (V - S (K exp(G))),   O = S (Q exp(G)) + A U

With M = E (I + diag(beta) L)^-1 diag(beta), E = [I; A], U and O together are

    [U; O] = M V + ([0; Q exp(G)] - M (K exp(G))) S = offset + left S

`kda_decode_prepare` makes left and offset once a head, for they do not depend on the state; keys
and queries are rows of one tile, keys first, so L and A are one product. `kda_decode` then meets
every strip of the state with one product. Matrix products take float32 operands, which NVIDIA
rounds to tf32. Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_rows_pallas import (
    REPLAYED,
    Place,
    finish,
    l2_normalize,
    locate,
    log_decay,
    masked,
    read,
    read_raw,
    silu,
    store,
    taps,
)
from pallas_kernels.kda_types import TAPS, KdaCache, KdaRows, KdaWeights, most_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockParts:
    """What the block does to any state; N keys, then N queries."""

    left: jax.Array  # f32[B, H, 2N, K] what meets the state
    offset: jax.Array  # f32[B, H, 2N, V] what is added; NaN in a row that has one anywhere


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Matrix product over one axis of each; NVIDIA GPUs round the operands to tf32."""
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _finite(x: jax.Array) -> jax.Array:
    """Replace NaN and infinities by zero."""
    return jnp.where(x * 0.0 == 0.0, x, 0.0)


class _Convolution:
    """SiLU of the convolution for a tile of rows; constructing it starts the loads."""

    def __init__(
        self,
        place: Place,
        rows: KdaRows,
        weights: KdaWeights,
        cache: KdaCache,
        time: jax.Array,  # i32[R, 1] row among the new ones
        column: jax.Array,  # i32[R, X] or [1, X]
        valid: jax.Array | None,
    ):
        here = time < rows.qkv.shape[1]
        self._terms = []
        for tap, factor in enumerate(taps(weights, column, valid)):
            source = time + (tap - TAPS + 1)
            at = (place.request, source, column)
            raw = [read_raw(rows.qkv, at, masked(at, here & (source >= 0), valid))]
            if tap < TAPS - 1:
                past = here & (source < 0) & (place.start + source >= 0)
                at = (place.slot, place.ring_row(source), column)
                raw.append(read_raw(cache.conv, at, masked(at, past, valid)))
            self._terms.append((raw, factor))

    @property
    def raw(self) -> jax.Array:
        """The new rows as they came."""
        return self._terms[-1][0][0]

    def result(self, maths: Maths) -> jax.Array:
        """f32[R, X], zero in rows that do not count."""
        terms = [
            sum(part.astype(jnp.float32) for part in raw) * factor for raw, factor in self._terms
        ]
        return silu(sum(terms[1:], terms[0]), maths)


def _solve(pairs: jax.Array, beta: jax.Array, is_key: jax.Array, time: jax.Array) -> jax.Array:
    """E (I + diag(beta) L)^-1, f32[2N, 2N], from the products [L; A]; its right half is zero.

    L's power N is zero, so the inverse is (I - P)(I + P^2)(I + P^4)...
    """
    size = pairs.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    column = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    power = jnp.where(is_key & (column < row), beta * pairs, 0.0)
    mixing = jnp.where(column <= time, pairs, 0.0)
    result = jnp.where(is_key, jnp.where(row == column, 1.0, 0.0), mixing)
    result -= _dot(result, power)
    order = 2
    while order < size // 2:
        power = _dot(power, power)
        result += _dot(result, power)
        order *= 2
    return result


def _rows(half: int) -> tuple[jax.Array, jax.Array]:
    """Which rows of the tile are keys, and each row's number among the new ones: [2N, 1]."""
    row = lax.broadcasted_iota(jnp.int32, (2 * half, 1), 0)
    return row < half, row & (half - 1)


def prepare_kernel(
    slots,  # i32[B]
    starts,  # i32[B]
    rows,  # KdaRows
    weights,  # KdaWeights
    cache,  # KdaCache
    parts,  # BlockParts
    after,  # KdaCache, the same memory as `cache`
    *,
    half: int,
    value_tile: int,
    key_tile: int,
    lower_bound: float | None,
    maths: Maths,
):
    """Write the parts, and all of the new rows that the cache keeps but their updates."""
    place = locate(slots, starts, None, cache, value_tile, key_tile)
    request, head, key_dim = place.request, place.head, place.dims[2]
    dtype, valid, value_valid = rows.qkv.dtype, place.key_valid, place.value_valid(1)
    is_key, time = _rows(half)
    here = time < rows.qkv.shape[1]
    column = jnp.where(is_key, place.key_column, place.query_column)
    mixed = _Convolution(place, rows, weights, cache, time, column, valid)
    # Values stand beside keys and queries: a product takes as many rows, and a NaN reaches both.
    row = lax.broadcasted_iota(jnp.int32, (2 * half, 1), 0)
    value_column = place.value_column(1)
    values = _Convolution(place, rows, weights, cache, time, value_column, value_valid)
    channel = place.query_column
    decay_at = (request, time, channel)
    projection = read_raw(rows.decay, decay_at, masked(decay_at, here, valid))
    bias = read_raw(weights.dt_bias, (channel,), valid)
    row_across = lax.broadcasted_iota(jnp.int32, (1, 2 * half), 1)
    time_across = row_across & (half - 1)
    is_row = time_across < rows.qkv.shape[1]
    beta = read(rows.beta, (request, time, head), here)
    beta_across = read(rows.beta, (request, time_across, head), is_row)
    a_log = weights.a_log[head]

    def inner():
        normed = l2_normalize(mixed.result(maths), 1, maths)
        value = values.result(maths).astype(dtype).astype(jnp.float32)
        decay = log_decay(projection, bias, a_log, lower_bound, maths)
        return normed, value, decay, maths.sigmoid(beta), maths.sigmoid(beta_across)

    # Triton would compute all this once more in each layout that a product wants, from converted
    # loads; it does not look through a branch. A null request takes zeros.
    empty = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.eval_shape(inner)]
    normed, value, decay, beta, beta_across = lax.cond(place.slot > 0, inner, lambda: tuple(empty))
    key = normed.astype(dtype)
    inputs = jnp.where(is_key, key.astype(jnp.float32), normed * key_dim**-0.5)
    decay = jnp.where(here if valid is None else here & valid, decay, 0.0)
    # A product would carry a NaN of one row into the others: such rows are run as zeros, and
    # their own results are NaN.
    taint = jnp.sum((inputs + decay) * 0.0, axis=1, keepdims=True) + beta * 0.0
    taint += jnp.sum(value * 0.0, axis=1, keepdims=True)
    inputs, finite_decay, beta = (_finite(part) for part in (inputs, decay, beta))
    by_key = jnp.where(is_key, finite_decay, 0.0)
    sums = lax.cumsum(finite_decay, axis=0)
    sums -= jnp.where(is_key, 0.0, jnp.sum(by_key, axis=0)[None, :])
    grown = maths.exp(sums)
    left = inputs * grown
    pairs = _dot(left, jnp.where(is_key, inputs / grown, 0.0), (1, 1))
    solved = _solve(pairs, beta, is_key, time) * _finite(beta_across)
    value = _finite(value)
    at = (request, head, row)

    # Always so; behind a branch these products change no layout before it, at 128 registers
    # instead of 150.
    @pl.when(place.slot >= 0)
    def meet():
        identity = jnp.where((row == row_across) & ~is_key, 1.0, 0.0)
        store(parts.left, (*at, place.key), _dot(identity - solved, left), valid)
        offset = _dot(solved, value) + taint
        store(parts.offset, (*at, place.value(1)), offset, value_valid)

    # Rows that are not written have an index of their own: interpreted, a masked store writes back
    # what it found.
    ring, nowhere = place.ring_row(time), 2 * place.ring + row
    new_key = is_key & here
    key_at = (place.slot, jnp.where(new_key, ring, nowhere), head, place.key)
    store(after.pending.key, key_at, key, new_key, valid)
    store(after.pending.decay, key_at, decay, new_key, valid)
    raw_at = (place.slot, jnp.where(here, ring, nowhere), column)
    store(after.conv, raw_at, mixed.raw, here, valid)
    value_at = (place.slot, jnp.where(new_key, ring, nowhere), value_column)
    store(after.conv, value_at, values.raw, new_key, value_valid)


def _replayed_state(place: Place, cache: KdaCache, maths: Maths) -> jax.Array:
    """The state after the accepted pending rows: f32[V, K].

    A loop, and not only to skip what was not accepted: Triton would otherwise compute all of this
    a second time, in the layout in which a matrix product wants the state. Decays of the rows to
    come go to the keys, so an element of the state takes a multiplication and an addition a row.
    """
    pending = cache.pending

    def load(row):
        at = (place.slot, place.ring_row(row - place.replayed), place.head)
        use = row < place.replayed
        key_at, value_at = (*at, place.key), (*at, place.value(0))
        key_mask = masked(key_at, use, place.key_valid)
        return (
            read_raw(pending.key, key_at, key_mask),
            read_raw(pending.update, value_at, masked(value_at, use, place.value_valid(0))),
            read_raw(pending.decay, key_at, key_mask),
        )

    def advance(group, state):
        rows = [load(group * REPLAYED + row) for row in range(min(REPLAYED, most_rows(cache)))]
        grown, keys = jnp.zeros(place.key.shape, jnp.float32), []
        for key, _, decay in reversed(rows):
            keys.append(key.astype(jnp.float32) * maths.exp(grown))
            grown += decay
        state = state * maths.exp(grown)
        for (_, update, _), key in zip(rows, reversed(keys), strict=True):
            state = maths.fma(key, update, state)
        return state

    state = read_raw(cache.state, place.state_at, place.state_valid)
    if most_rows(cache) == 1:
        return advance(0, state)
    return lax.fori_loop(0, (place.replayed + REPLAYED - 1) // REPLAYED, advance, state)


def apply_kernel(
    slots,  # i32[B]
    starts,  # i32[B]
    accepted,  # i32[B]
    rows,  # KdaRows
    weights,  # KdaWeights
    parts,  # BlockParts
    cache,  # KdaCache
    out_ref,  # [B, T, H*V]
    squares_ref,  # f32[B, T, H, strips] sums of squares before the norm
    broken,  # bool[B, H, strips] something of a live request is not finite
    after,  # KdaCache, the same memory as `cache`
    *,
    strip: int,
    key_tile: int,
    norm_eps: float | None,
    maths: Maths,
):
    """Replay, then run the block on the strip.

    The state is asked for first: the products' operands pass through shared memory as soon as
    they are there, and what is loaded behind those barriers waits.
    """
    place = locate(slots, starts, accepted, cache, strip, key_tile)
    request, head, value_valid = place.request, place.head, place.value_valid(1)
    size = parts.left.shape[2]
    is_key, time = _rows(size // 2)
    here = time < rows.qkv.shape[1]
    row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    state = _replayed_state(place, cache, maths)
    at = (request, head, row)
    left = read_raw(parts.left, (*at, place.key), masked((row, place.key), place.key_valid))
    offset_at = (*at, place.value(1))
    offset = read_raw(parts.offset, offset_at, masked(offset_at, value_valid))
    store(after.state, place.state_at, state, place.state_valid)
    both = _dot(left, state, (1, 1)) + offset

    nowhere = 2 * place.ring + row
    new_key, new_query = is_key & here, ~is_key & here
    out_column = place.out_column(1)
    gate_at = (request, time, out_column)
    gate = read(rows.gate, gate_at, masked(gate_at, new_query, value_valid))
    scale = read_raw(weights.o_norm, (place.value(1),), value_valid)
    out, squares = finish(place, both, gate, scale, norm_eps, (1,), maths)
    bad = jnp.sum(jnp.where(here, out * 0.0, 0.0)) != 0.0
    query_row = jnp.where(new_query, time, nowhere)
    store(out_ref, (request, query_row, out_column), out, new_query, value_valid)
    store(squares_ref, (request, query_row, head, place.part), squares, new_query)
    key_at = (place.slot, jnp.where(new_key, place.ring_row(time), nowhere), head)
    store(after.pending.update, (*key_at, place.value(1)), both, new_key, value_valid)
    broken[request, head, place.part] = (place.slot > 0) & bad
