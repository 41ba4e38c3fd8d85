"""The mathematics of Kimi Delta Attention (KDA) that decode and prefill share, in plain jnp.

S <- S diag(exp g_t);  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = S q_t, all in float32, S [V, K].
Source: Kimi Linear (arXiv 2510.26692); the bounded gate is Kimi-K3's.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.health import BIT_SLOT
from pallas_kernels.kda_types import TAPS, KdaCache, KdaRows, KdaWeights, most_rows
from pallas_kernels.norm import l2_norm, rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaInputs:
    """What the recurrence reads of each row."""

    query: jax.Array  # f32[B, T, H, K] normalized, times K^-0.5
    key: jax.Array  # [B, T, H, K] normalized, compute dtype
    value: jax.Array  # [B, T, H, V] compute dtype
    decay: jax.Array  # f32[B, T, H, K] log decay
    beta: jax.Array  # f32[B, T, H]


def short_conv(rows: jax.Array, window: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply SiLU to the causal depthwise convolution of [window, rows].

    rows: [B, T, C]; window: [B, 3, C], the rows before them; weight: f32[4, C].
    Returns f32[B, T, C].
    """
    length = rows.shape[1]
    extended = jnp.concatenate([window, rows], axis=1).astype(jnp.float32)
    taps = [extended[:, tap : tap + length] * weight[None, None, tap] for tap in range(TAPS)]
    return jax.nn.silu(sum(taps[1:], taps[0]))


def decay_gate(
    projection: jax.Array,  # [B, T, H*K]
    a_log: jax.Array,  # f32[H]
    dt_bias: jax.Array,  # f32[H*K]
    lower_bound: float | None,
) -> jax.Array:
    """Return the log decay, f32[B, T, H, K], never positive.

    With a lower bound: lower_bound * sigmoid(exp(a_log) (z + dt_bias)); without:
    -exp(a_log) * softplus(z + dt_bias).
    """
    heads = a_log.shape[0]
    biased = projection.astype(jnp.float32) + dt_bias[None, None]
    biased = biased.reshape(*projection.shape[:2], heads, -1)
    rate = jnp.exp(a_log)[None, None, :, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(biased)
    return lower_bound * jax.nn.sigmoid(rate * biased)


def recurrence_inputs(
    rows: KdaRows, window: jax.Array, weights: KdaWeights, lower_bound: float | None
) -> KdaInputs:
    """Run convolution, normalization and gates of `rows`, which follow `window` [B, 3, C].

    Keys and values are rounded to the compute dtype, as pending rows keep them, so that a replay
    takes the very same inputs.
    """
    batch, length, channels = rows.qkv.shape
    heads = weights.a_log.shape[0]
    value_dim = weights.o_norm.shape[0]
    key_width = (channels - heads * value_dim) // 2
    mixed = short_conv(rows.qkv, window, weights.conv)
    query, key, value = jnp.split(mixed, [key_width, 2 * key_width], axis=-1)
    by_head = (batch, length, heads, -1)
    key_dim = key_width // heads
    return KdaInputs(
        query=l2_norm(query.reshape(by_head)) * key_dim**-0.5,
        key=l2_norm(key.reshape(by_head)).astype(rows.qkv.dtype),
        value=value.reshape(by_head).astype(rows.qkv.dtype),
        decay=decay_gate(rows.decay, weights.a_log, weights.dt_bias, lower_bound),
        beta=jax.nn.sigmoid(rows.beta.astype(jnp.float32)),
    )


def delta_step(
    state: jax.Array,  # f32[B, H, V, K]
    key: jax.Array,  # [B, H, K]
    value: jax.Array,  # [B, H, V]
    decay: jax.Array,  # f32[B, H, K]
    beta: jax.Array,  # f32[B, H]
) -> tuple[jax.Array, jax.Array]:
    """Advance the state by one row: (state, update f32[B, H, V]).

    The update is taken against the decayed state; `replay_step` with it gives the same state.
    """
    decayed = state * jnp.exp(decay)[..., None, :]
    wide = key.astype(jnp.float32)[..., None, :]
    error = value.astype(jnp.float32) - jnp.sum(decayed * wide, axis=-1)
    update = beta[..., None] * error
    return decayed + wide * update[..., None], update


def replay_step(
    state: jax.Array,  # f32[B, H, V, K]
    key: jax.Array,  # [B, H, K]
    update: jax.Array,  # f32[B, H, V]
    decay: jax.Array,  # f32[B, H, K]
) -> jax.Array:
    """Advance the state by a row whose update is known."""
    decayed = state * jnp.exp(decay)[..., None, :]
    return decayed + key.astype(jnp.float32)[..., None, :] * update[..., None]


def gated_output(
    out: jax.Array,  # f32[B, T, H, V]
    gate: jax.Array,  # [B, T, H*V]
    o_norm: jax.Array,  # f32[V]
    norm_eps: float,
) -> jax.Array:
    """Return rms(out) * o_norm * sigmoid(gate) as [B, T, H*V] in gate.dtype."""
    normed = rms_norm(out, o_norm, eps=norm_eps).reshape(gate.shape)
    return (normed * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


def resolve_slots(slots: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Map slot numbers outside [1, size) to the null slot 0.

    Returns (slots i32[B], live bool[B], health u32[] with BIT_SLOT if any lay beyond the cache).
    """
    beyond = slots >= size
    live = (slots > 0) & ~beyond
    health = jnp.where(jnp.any(beyond), BIT_SLOT, 0).astype(jnp.uint32)
    return jnp.where(live, slots, 0), live, health


def replay(
    cache: KdaCache, slots: jax.Array, starts: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read what rows from position starts[b] on continue: the window, and the state replayed.

    slots: i32[B] in [0, S); accepted: i32[B], clamped to [0, most_rows]: the rows before starts
    that the state lacks. Returns (window [B, 3, C], zero before position 0; state f32[B, H, V, K]).
    Rows that were not accepted reach neither, bit for bit.
    """
    most = most_rows(cache)
    count = jnp.clip(accepted, 0, most)
    at = _ring_index(cache, starts - count, most)
    pending = jax.tree.map(lambda leaf: leaf[slots[:, None], at], cache.pending)

    def advance(row, state):
        key, update, decay = (
            lax.dynamic_index_in_dim(leaf, row, axis=1, keepdims=False)
            for leaf in (pending.key, pending.update, pending.decay)
        )
        after = replay_step(state, key, update, decay)
        return jnp.where((row < count)[:, None, None, None], after, state)

    state = lax.fori_loop(0, jnp.max(count), advance, cache.state[slots])
    return window_before(cache, slots, starts), state


def window_before(cache: KdaCache, slots: jax.Array, starts: jax.Array) -> jax.Array:
    """The raw projections of the three rows before position starts[b]: [B, 3, C], zero before 0."""
    past = TAPS - 1
    window = cache.conv[slots[:, None], _ring_index(cache, starts - past, past)]
    known = starts[:, None] + jnp.arange(-past, 0, dtype=starts.dtype)[None] >= 0
    return jnp.where(known[..., None], window, jnp.zeros((), window.dtype))


def store_rows(
    cache: KdaCache,
    pool: jax.Array,  # [S, R, ...] a ring of the cache
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    rows: jax.Array,  # [B, T, ...] at positions starts[b] and on
) -> jax.Array:
    """Put rows into a ring, in its dtype; T at most R."""
    at = _ring_index(cache, starts, rows.shape[1])
    return pool.at[slots[:, None], at].set(rows.astype(pool.dtype))


def store_window(
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    lengths: jax.Array,  # i32[B]
    rows: jax.Array,  # [B, T, C] raw projections at positions starts[b] and on
) -> jax.Array:
    """Put the last three of each request's lengths[b] rows into cache.conv, which it returns."""
    past = TAPS - 1
    last = lengths[:, None] + jnp.arange(-past, 0, dtype=lengths.dtype)[None]
    taken = jnp.take_along_axis(rows, jnp.maximum(last, 0)[..., None], axis=1)
    ring = cache.conv.shape[1]
    at = jnp.where(last >= 0, (starts[:, None] + last) % ring, ring)
    return cache.conv.at[slots[:, None], at].set(taken, mode="drop")


def _ring_index(cache: KdaCache, first: jax.Array, count: int) -> jax.Array:
    """Where the rows at positions first[b] and on lie: i32[B, count]."""
    positions = first[:, None] + jnp.arange(count, dtype=first.dtype)[None]
    return positions % cache.conv.shape[1]


def nonfinite_requests(out: jax.Array, live: jax.Array) -> jax.Array:
    """Flag the live requests with a NaN or infinity in their rows: bool[B]."""
    return live & ~jnp.all(jnp.isfinite(out), axis=tuple(range(1, out.ndim)))
