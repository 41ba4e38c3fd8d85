"""KDA decode of all new rows of a request at once: the WY form of a chunk, in two kernels.

With S the state after the replay, G_t the log decay summed over the new rows up to t, and i <= t:

    L_ti = k_t . exp(G_t - G_i) k_i  (i < t),   A_ti = q_t . exp(G_t - G_i) k_i
    U = (I + diag(beta) L)^-1 diag(beta) (V - S (K exp(G))),   O = S (Q exp(G)) + A U

Without U these are offset + left S, where for the keys

    left_t = -beta_t (k_t exp(G_t) + sum_(i<t) L_ti left_i)
    offset_t = beta_t (v_t - sum_(i<t) L_ti offset_i)

and for the queries, from the keys' rows, q_t exp(G_t) + sum_(i<=t) A_ti left_i and
sum_(i<=t) A_ti offset_i.

`kda_decode_prepare` makes them once a head, for they do not depend on the state; L and A are one
product. `kda_decode` then meets every strip of the state with one product. Matrix products take
float32 operands, which NVIDIA rounds to tf32. Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

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
    """What the block does to any state; N keys, then N queries; undefined beyond the new rows."""

    left: jax.Array  # f32[B, H, 2N, K] what meets the state
    offset: jax.Array  # f32[B, H, 2N, V] what is added


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Matrix product over one axis of each; NVIDIA GPUs round the operands to tf32."""
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _convolve(
    place: Place,
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    column: jax.Array,  # i32[X]
    valid: jax.Array | None,
) -> tuple[list[jax.Array], Callable[[Maths], list[jax.Array]]]:
    """Start the loads: (the new rows as they came, SiLU of the convolution, f32[X] a row)."""
    new = [(place.request, row, column) for row in range(rows.qkv.shape[1])]
    fresh = [read_raw(rows.qkv, at, masked(at, valid)) for at in new]
    factors = taps(weights, column, valid)
    past = []
    for offset in range(1 - TAPS, 0):
        at = (place.slot, place.ring_row(offset), column)
        past.append(read_raw(cache.conv, at, masked(at, place.start + offset >= 0, valid)))

    def mix(maths: Maths) -> list[jax.Array]:
        wide = [raw.astype(jnp.float32) for raw in (*past, *fresh)]
        mixed = []
        for row in range(len(fresh)):
            total = wide[row] * factors[0]
            for tap in range(1, TAPS):
                total = maths.fma(wide[row + tap], factors[tap], total)
            mixed.append(silu(total, maths))
        return mixed

    return fresh, mix


def _stack(vectors: list[jax.Array], size: int) -> jax.Array:
    """A tile f32[size, X] of vectors [X], zero below them."""
    row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    tile = jnp.zeros((size, vectors[0].size), jnp.float32)
    for number, vector in enumerate(vectors):
        tile = jnp.where(row == number, vector[None, :], tile)
    return tile


def _pick(tile: jax.Array, number: int, axis: int) -> jax.Array:
    """One index of an axis: no instruction where a thread holds all of it.

    The zeros are negative, for the compiler may leave out their addition.
    """
    shape = [1] * tile.ndim
    shape[axis] = tile.shape[axis]
    index = lax.broadcasted_iota(jnp.int32, shape, axis)
    return jnp.sum(jnp.where(index == number, tile, -0.0), axis=axis)


def _eliminate(
    keys: list[jax.Array],  # f32[X] of every row
    queries: list[jax.Array],  # f32[X]
    pairs: jax.Array,  # f32[2N, 2N] [-L; A] in its left half
    betas: list[jax.Array],  # f32[] before the sigmoid
    maths: Maths,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(x_t = beta_t (key_t - sum_(i<t) L_ti x_i), query_t + sum_(i<=t) A_ti x_i), float32.

    A thread has a channel of all rows, so a NaN reaches its own row and those after it.
    """
    size, width = pairs.shape[0], keys[0].size
    wide = jnp.broadcast_to(pairs[:, :, None], (size, size, width))
    columns = [_pick(wide, number, 1) for number in range(len(keys))]
    solved: list[jax.Array] = []
    mixed = []
    for row, (total, result, beta) in enumerate(zip(keys, queries, betas, strict=True)):
        for known, column in zip(solved, columns, strict=False):
            total = maths.fma(_pick(column, row, 0), known, total)
        solved.append(maths.sigmoid(jnp.broadcast_to(beta, (width,))) * total)
        for known, column in zip(solved, columns, strict=False):
            result = maths.fma(_pick(column, size // 2 + row, 0), known, result)
        mixed.append(result)
    return solved, mixed


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
    """Write the parts, and all of the new rows that the cache keeps but their updates.

    A vector of a row has a channel a thread: whatever goes from row to row stays in registers, and
    threads meet in the norm and in the product alone.
    """
    place = locate(slots, starts, None, cache, value_tile, key_tile)
    request, head, (heads, value_dim, key_dim) = place.request, place.head, place.dims
    new, dtype = rows.qkv.shape[1], rows.qkv.dtype
    key = lax.iota(jnp.int32, key_tile)
    value = lax.iota(jnp.int32, value_tile)
    valid = None if key_dim == key_tile else key < key_dim
    value_valid = None if value_dim == value_tile else value < value_dim
    channel = head * key_dim + key
    columns = (
        (channel, valid),
        (heads * key_dim + channel, valid),
        (2 * heads * key_dim + head * value_dim + value, value_valid),
    )
    loaded = [_convolve(place, rows, weights, cache, *column) for column in columns]
    projections = [read_raw(rows.decay, (request, row, channel), valid) for row in range(new)]
    bias = read_raw(weights.dt_bias, (channel,), valid)
    betas = [rows.beta[request, row, head].astype(jnp.float32) for row in range(new)]
    a_log = weights.a_log[head]

    queries, keys, values = (mix(maths) for _, mix in loaded)
    values = [each.astype(dtype).astype(jnp.float32) for each in values]
    decays = [log_decay(each, bias, a_log, lower_bound, maths) for each in projections]
    size = 1 << (2 * new - 1).bit_length()
    normed = l2_normalize(_stack([*keys, *queries], size), 1, maths)
    keys = [_pick(normed, row, 0).astype(dtype) for row in range(new)]
    queries = [_pick(normed, new + row, 0) * key_dim**-0.5 for row in range(new)]
    left_keys, left_queries, right_keys = [], [], []
    total = jnp.zeros(key.shape, jnp.float32)
    for rounded, query, decay in zip(keys, queries, decays, strict=True):
        total += decay
        grown, wide = maths.exp(total), rounded.astype(jnp.float32)
        left_keys.append(-wide * grown)
        left_queries.append(query * grown)
        right_keys.append(wide * maths.exp(-total))
    empty = [jnp.zeros(key.shape, jnp.float32)] * (half - new)
    left = _stack([*left_keys, *empty, *left_queries], 2 * half)
    right = _stack(right_keys, 2 * half)
    # Out of one array: XLA would make every row of a transposed tile in a layout of the tile's own.
    side = lax.broadcasted_iota(jnp.int32, (2, 1, 1), 0)
    both = jnp.where(side == 0, left[None], right[None])
    # The condition always holds. It gives the product a block of its own: Triton looks from a
    # product over its whole block, and took more than twice as long to compile all of this.
    pairs = lax.cond(
        place.slot >= 0,
        lambda: _dot(_pick(both, 0, 0), _pick(both, 1, 0), (1, 1)),
        lambda: jnp.zeros((2 * half, 2 * half), jnp.float32),
    )

    nothing = [jnp.zeros(value.shape, jnp.float32)] * new
    for ref, column, mask, own_keys, own_queries in (
        (parts.left, key, valid, left_keys, left_queries),
        (parts.offset, value, value_valid, values, nothing),
    ):
        solved, mixed = _eliminate(own_keys, own_queries, pairs, betas, maths)
        for row in range(new):
            store(ref, (request, head, row, column), solved[row], mask)
            store(ref, (request, head, half + row, column), mixed[row], mask)
    for row in range(new):
        at = (place.slot, place.ring_row(row))
        store(after.pending.key, (*at, head, key), keys[row], valid)
        store(after.pending.decay, (*at, head, key), decays[row], valid)
        for (fresh, _), (column, mask) in zip(loaded, columns, strict=True):
            store(after.conv, (*at, column), fresh[row], mask)


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
    scale = read_raw(weights.o_norm, (place.value(1),), value_valid)
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
    out, squares = finish(place, both, gate, scale, norm_eps, (1,), maths)
    bad = jnp.sum(jnp.where(here, out * 0.0, 0.0)) != 0.0
    query_row = jnp.where(new_query, time, nowhere)
    store(out_ref, (request, query_row, out_column), out, new_query, value_valid)
    store(squares_ref, (request, query_row, head, place.part), squares, new_query)
    key_at = (place.slot, jnp.where(new_key, place.ring_row(time), nowhere), head)
    store(after.pending.update, (*key_at, place.value(1)), both, new_key, value_valid)
    broken[request, head, place.part] = (place.slot > 0) & bad
