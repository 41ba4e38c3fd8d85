"""Plain-jnp KDA prefill.

Within a chunk, with G_i the log decay summed over rows up to i and S_0 the state before it:
u_i = beta_i (v_i - S_0 (exp(G_i) k_i) - sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j),
o_i = S_0 (exp(G_i) q_i) + sum_{j<=i} (q_i . exp(G_i - G_j) k_j) u_j,
S_C = S_0 diag(exp(G_C)) + sum_j u_j (exp(G_C - G_j) k_j)^T: a unit triangular solve for u and a few
small products. Only exponentials of sums that are never positive are formed.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kda_common import (
    KdaInputs,
    gated_output,
    nonfinite_requests,
    recurrence_inputs,
    replay,
    resolve_slots,
    store_window,
)
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights

CHUNK = 16  # the [CHUNK, CHUNK, K] pair factors of a head stay in a CPU's cache
STRONGEST_DECAY = -200.0  # its exponential is zero in float32; it keeps 0 * -inf out of the sums

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def kda_prefill_reference(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,
    starts: jax.Array,
    accepted: jax.Array,
    fresh: jax.Array,
    *,
    lengths: jax.Array,
    lower_bound: float | None,
    norm_eps: float,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_prefill`."""
    slots, live, health = resolve_slots(slots, cache.state.shape[0])
    lengths = jnp.where(live, jnp.clip(lengths, 0, rows.qkv.shape[1]), 0)
    window, state = replay(cache, slots, starts, jnp.where(live & ~fresh, accepted, 0))
    state = jnp.where(fresh[:, None, None, None], 0, state)

    def advance(carry, chunk):
        state, window = carry
        chunk_rows, valid = chunk
        inputs = _silence(recurrence_inputs(chunk_rows, window, weights, lower_bound), valid)
        state, out = chunk_delta(state, inputs)
        out = gated_output(out, chunk_rows.gate, weights.o_norm, norm_eps)
        return (state, chunk_rows.qkv[:, -window.shape[1] :]), out

    state, out = _scan_chunks(advance, (state, window), rows, lengths)
    cache = KdaCache(
        conv=store_window(cache, slots, starts, lengths, rows.qkv),
        state=cache.state.at[slots].set(state),
        pending=cache.pending,
    )
    return out, cache, nonfinite_requests(out, live), health


def _scan_chunks(advance, carry, rows: KdaRows, lengths: jax.Array):
    """Run `advance` over the chunks that hold a valid row; returns (state, out [B, T, H*V])."""
    total = rows.gate.shape[1]
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, -total % CHUNK), (0, 0))), rows)

    def body(index, loop):
        carry, out = loop
        start = index * CHUNK
        valid = (start + jnp.arange(CHUNK))[None] < lengths[:, None]
        chunk = jax.tree.map(
            lambda leaf: jnp.where(
                valid[..., None], lax.dynamic_slice_in_dim(leaf, start, CHUNK, axis=1), 0
            ),
            rows,
        )
        carry, chunk_out = advance(carry, (chunk, valid))
        chunk_out = jnp.where(valid[..., None], chunk_out, 0)
        return carry, lax.dynamic_update_slice_in_dim(out, chunk_out, start, axis=1)

    chunks = (jnp.max(lengths) + CHUNK - 1) // CHUNK
    (state, _), out = lax.fori_loop(0, chunks, body, (carry, jnp.zeros_like(rows.gate)))
    return state, out[:, :total]


def _silence(inputs: KdaInputs, valid: jax.Array) -> KdaInputs:
    """Make the padding rows leave the state as it is: no decay, no update."""
    return KdaInputs(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        decay=jnp.where(valid[..., None, None], inputs.decay, 0.0),
        beta=jnp.where(valid[..., None], inputs.beta, 0.0),
    )


def chunk_delta(state: jax.Array, inputs: KdaInputs) -> tuple[jax.Array, jax.Array]:
    """Run a chunk of rows at once: state f32[B, H, V, K] -> (state, o f32[B, T, H, V])."""
    query, key, value, beta = (
        jnp.moveaxis(leaf.astype(jnp.float32), 1, 2)
        for leaf in (inputs.query, inputs.key, inputs.value, inputs.beta)
    )
    factors = _pair_factors(inputs.decay)  # [B, H, T, 1 + T, K]
    from_start, pairs, to_end = factors[:, :, :, 0], factors[:, :, :, 1:], factors[:, :, -1, 1:]
    products = einsum(
        "bhtpk,bhtsk->bhpts", jnp.stack([key, query], axis=3), pairs * key[:, :, None]
    )
    key_products, query_products = products[:, :, 0], products[:, :, 1]
    error = value - einsum("bhtk,bhvk->bhtv", from_start * key, state)
    inverse = unit_lower_inverse(beta[..., None] * key_products)
    update = einsum("bhts,bhsv->bhtv", inverse, beta[..., None] * error)
    causal = np.tril(np.ones(query_products.shape[2:], bool))[None, None]
    query_products = jnp.where(causal, query_products, 0.0)
    out = einsum("bhtk,bhvk->bhtv", from_start * query, state)
    out = out + einsum("bhts,bhsv->bhtv", query_products, update)
    state = from_start[:, :, -1, None, :] * state
    state = state + einsum("bhtk,bhtv->bhvk", to_end * key, update)
    return state, jnp.moveaxis(out, 2, 1)


def _pair_factors(decay: jax.Array) -> jax.Array:
    """Decay between every pair of rows: f32[B, T, H, K] -> [B, H, T, 1 + T, K].

    Entry [t, 1 + s] is the product of the decays of rows s+1..t, entry [t, 0] that of rows 0..t,
    and 1 where s >= t. The logs are summed segment by segment: a difference of cumulative
    sums would lose the digits of a weak decay behind a strong one.
    """
    length = decay.shape[1]
    row, first, summed = np.ogrid[:length, : length + 1, :length]
    segments = ((summed >= first) & (summed <= row)).astype(np.float32)
    decay = jnp.maximum(decay, STRONGEST_DECAY)
    return jnp.exp(einsum("tsr,brhk->bhtsk", segments, decay))


def unit_lower_inverse(matrix: jax.Array) -> jax.Array:
    """Invert I + the strictly lower part of f32[..., T, T], T a power of two.

    Diagonal blocks of twice the width are inverted from two inverses and the block below between
    them: [[X, 0], [-Y L X, Y]]. No pivot, no threaded library, and no power of the matrix, whose
    entries would cancel.
    """
    length = matrix.shape[-1]
    row, column = np.ogrid[:length, :length]
    leading = tuple(range(matrix.ndim - 2))

    def lower(width: int) -> jax.Array:
        below = (row // width == column // width + 1) & (row // width % 2 == 1)
        return jnp.where(jnp.expand_dims(below, leading), matrix, 0.0)

    inverse = jnp.expand_dims(jnp.eye(length, dtype=matrix.dtype), leading) - lower(1)
    width = 2
    while width < length:
        inverse = inverse - jnp.matmul(
            inverse,
            jnp.matmul(lower(width), inverse, precision=lax.Precision.HIGHEST),
            precision=lax.Precision.HIGHEST,
        )
        width *= 2
    return inverse
