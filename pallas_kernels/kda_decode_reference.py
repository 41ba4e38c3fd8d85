"""Plain-jnp KDA decode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda_common import (
    KdaInputs,
    delta_step,
    gated_output,
    nonfinite_requests,
    recurrence_inputs,
    replay,
    resolve_slots,
)
from pallas_kernels.kda_types import KdaCache, KdaPending, KdaRows, KdaWeights


def kda_decode_reference(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,
    accepted: jax.Array,
    *,
    lower_bound: float | None,
    norm_eps: float,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_decode`."""
    slots, live, health = resolve_slots(slots, cache.state.shape[0])
    conv, state = replay(cache, slots, jnp.where(live, accepted, 0))
    inputs = recurrence_inputs(rows, conv, weights, lower_bound)
    out = gated_output(_run(state, inputs), rows.gate, weights.o_norm, norm_eps)
    out = jnp.where(live[:, None, None], out, 0)
    cache = KdaCache(
        conv=cache.conv.at[slots].set(conv),
        state=cache.state.at[slots].set(state),
        pending=_store(cache.pending, slots, rows, inputs),
    )
    return out, cache, nonfinite_requests(out, live), health


def _run(state: jax.Array, inputs: KdaInputs) -> jax.Array:
    """Run the rows one after another from `state` and return o, f32[B, T, H, V]."""

    def step(state, row):
        state = delta_step(state, row.key, row.value, row.decay, row.beta)
        return state, jnp.sum(state * row.query[..., None], axis=-2)

    by_row = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), inputs)
    _, out = lax.scan(step, state, by_row)
    return jnp.moveaxis(out, 0, 1)


def _store(pending: KdaPending, slots: jax.Array, rows: KdaRows, inputs: KdaInputs) -> KdaPending:
    length = rows.qkv.shape[1]

    def put(old, new):
        return old.at[slots, :length].set(new.astype(old.dtype))

    return KdaPending(
        conv=put(pending.conv, rows.qkv),
        key=put(pending.key, inputs.key),
        value=put(pending.value, inputs.value),
        decay=put(pending.decay, inputs.decay),
        beta=put(pending.beta, inputs.beta),
    )
