"""KDA decode of one new row after at most one replayed row: a closed form of two rows.

With S the decayed state, k, u, the replayed key and its update, a the decay of the new row:
S' = S + k u^T with u = beta (v - S^T k), and every product of the new row with a * S' splits into
one with S and one with k. So all sums over the state are taken at once, and none waits for another.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kda_rows_pallas import (
    Block,
    Convolution,
    Gates,
    l2_normalize,
    locate,
    moved_window,
    read,
    read_raw,
    report,
)


def pair_kernel(
    slots,  # i32[B]
    accepted,  # i32[B]
    rows,  # KdaRows, T = 1
    weights,  # KdaWeights
    cache,  # KdaCache, Q = 1
    out_ref,  # [B, 1, H*V]
    words,  # i32[B, H]
    after,  # KdaCache, the same memory as `cache`
    *,
    tile: tuple[int, int],
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
):
    """Vectors lie along lanes, [1, K] and [1, V], and meet the state [K, V] as columns and rows."""
    head, request = pl.program_id(0), pl.program_id(1)
    size, heads, key_dim, value_dim = cache.state.shape
    given, slot, replayed = locate(slots, accepted, size, 1)
    only = lax.broadcasted_iota(jnp.int32, (1, 1), 0)
    block = Block(request, head, slot, replayed, row=only, first_new=0, new=1)
    lane = lax.broadcasted_iota(jnp.int32, (1, tile[0]), 1)
    value_lane = lax.broadcasted_iota(jnp.int32, (1, tile[1]), 1)
    valid, value_valid = lane < key_dim, value_lane < value_dim
    key_row = lax.broadcasted_iota(jnp.int32, (tile[0], 1), 0)
    padded = tile != (key_dim, value_dim)
    state_valid = (key_row < key_dim) & value_valid if padded else None
    state_at = (slot, head, key_row, value_lane)
    key_column = heads * key_dim + head * key_dim
    columns = [
        (head * key_dim + lane, valid),
        (key_column + lane, valid),
        (2 * heads * key_dim + head * value_dim + value_lane, value_valid),
    ]
    mixed = [Convolution(block, rows, weights, *at) for at in columns]
    gates = Gates(block, rows, weights, lane, value_lane, (key_dim, value_dim))
    state = read_raw(cache.state, state_at, state_valid)
    for convolution in mixed:
        convolution.load_past(cache)
    windows = [moved_window(block, cache, *at) for at in columns]
    old_at = (slot, only, head)
    is_old = block.is_old
    old_key = read(cache.pending.key, (*old_at, lane), is_old & valid)
    old_value = read(cache.pending.value, (*old_at, value_lane), is_old & value_valid)
    old_decay = read_raw(cache.pending.decay, (*old_at, lane), is_old & valid)
    old_beta = read_raw(cache.pending.beta, old_at, is_old)

    dtype = rows.qkv.dtype
    query = l2_normalize(mixed[0].result(), axis=1) * key_dim**-0.5
    key = l2_normalize(mixed[1].result(), axis=1).astype(dtype)
    value = mixed[2].result().astype(dtype)
    decay, beta = gates.decay(lower_bound), gates.beta()
    new_key = key.astype(jnp.float32)
    shrink = jnp.exp(decay)

    def column(line):
        # Through one axis: then it is the vector that changes its layout, and not the state.
        return jnp.sum(line, axis=0)[:, None]

    old_column = column(old_key)
    state *= column(jnp.exp(old_decay))
    over_keys = [
        jnp.sum(state * vector, axis=0, keepdims=True)
        for vector in (old_column, column(shrink * new_key), column(shrink * query))
    ]
    products = [
        jnp.sum(left * right, axis=1, keepdims=True)
        for left, right in (
            (shrink * new_key, old_key),
            (shrink * query, old_key),
            (query, new_key),
        )
    ]
    update = old_beta * (old_value - over_keys[0])
    new_state = state + old_column * update
    new_update = beta * (value.astype(jnp.float32) - over_keys[1] - products[0] * update)
    out = over_keys[2] + products[1] * update + products[2] * new_update
    mean = jnp.sum(jnp.where(value_valid, out * out, 0.0), axis=1, keepdims=True) / value_dim
    out *= lax.rsqrt(mean + norm_eps) * gates.scale()
    broken = jnp.sum(jnp.where(value_valid, out * 0.0, 0.0)) != 0.0

    if not interpret:
        launch.barrier()  # the pools change in place: every thread has read before one writes
    launch.store(after.state.at[state_at], new_state, mask=state_valid)
    out = jnp.where(slot > 0, out, 0.0).astype(out_ref.dtype)
    launch.store(out_ref.at[gates.gate_at], out, mask=value_valid)
    words[request, head] = report(given, size, broken)
    for (column, mask), convolution, (window_at, kept, window) in zip(
        columns, mixed, windows, strict=True
    ):
        launch.store(after.conv.at[window_at], window, mask=kept)
        launch.store(after.pending.conv.at[slot, only, column], convolution.raw, mask=mask)
    launch.store(after.pending.key.at[*old_at, lane], key, mask=valid)
    launch.store(after.pending.value.at[*old_at, value_lane], value, mask=value_valid)
    launch.store(after.pending.decay.at[*old_at, lane], decay, mask=valid)
    launch.store(after.pending.beta.at[old_at], beta)
