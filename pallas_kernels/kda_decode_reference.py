"""Plain-jnp KDA decode."""

from __future__ import annotations

from functools import partial

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
    store_rows,
)
from pallas_kernels.kda_types import KdaCache, KdaPending, KdaRows, KdaWeights
from pallas_kernels.norm import Unnormed


def kda_decode_reference(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,
    starts: jax.Array,
    accepted: jax.Array,
    *,
    lower_bound: float | None,
    norm_eps: float,
    norm: bool,
) -> tuple[jax.Array | Unnormed, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_decode`."""
    slots, live, health = resolve_slots(slots, cache.state.shape[0])
    window, state = replay(cache, slots, starts, jnp.where(live, accepted, 0))
    inputs = recurrence_inputs(rows, window, weights, lower_bound)
    out, updates = _run(state, inputs)
    gate, wide = rows.gate, live[:, None, None]
    if norm:
        mixed = gated_output(out, gate, weights.o_norm, norm_eps)
    else:
        gated = out * weights.o_norm[None, None, None]
        gated = gated.reshape(gate.shape) * jax.nn.sigmoid(gate.astype(jnp.float32))
        mixed = gated.astype(gate.dtype)
    mixed = jnp.where(wide, mixed, 0)
    squares = jnp.where(wide[..., None], jnp.sum(out * out, axis=-1, keepdims=True), 0)
    put = partial(store_rows, cache, slots=slots, starts=starts)
    pending = KdaPending(
        key=put(cache.pending.key, rows=inputs.key),
        update=put(cache.pending.update, rows=updates),
        decay=put(cache.pending.decay, rows=inputs.decay),
    )
    cache = KdaCache(
        conv=put(cache.conv, rows=rows.qkv),
        state=cache.state.at[slots].set(state),
        pending=pending,
    )
    result = mixed if norm else Unnormed(mixed, squares)
    return result, cache, nonfinite_requests(mixed, live), health


def _run(state: jax.Array, inputs: KdaInputs) -> tuple[jax.Array, jax.Array]:
    """Run the rows one after another from `state`: (o, updates), f32[B, T, H, V] each."""

    def step(state, row):
        state, update = delta_step(state, row.key, row.value, row.decay, row.beta)
        return state, (jnp.sum(state * row.query[..., None, :], axis=-1), update)

    by_row = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), inputs)
    _, results = lax.scan(step, state, by_row)
    out, updates = (jnp.moveaxis(leaf, 0, 1) for leaf in results)
    return out, updates
