"""What an op computes but does not return, computed once more in plain jnp; only traces pay."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.model.inputs import StepPlan
from pallas_kernels import KdaCache, KdaRows, KdaWeights
from pallas_kernels.kda_common import delta_step, recurrence_inputs, replay, short_conv


def kda_internals(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    plan: StepPlan,
    *,
    lower_bound: float | None,
) -> dict[str, jax.Array]:
    """The parts of a KDA layer between its projections and its gated norm, in float32.

    `cache` is the one before the step. Returns kda_q, kda_k, kda_v [W, H*dim] after convolution and
    SiLU, kda_decay [W, H, K] (log), kda_beta [W, H] and kda_core [W, H, V], the recurrence's
    output; this rank's heads. Rows that are not valid mean nothing.
    """
    window, state = replay(cache, plan.slots, plan.starts, jnp.where(plan.fresh, 0, plan.accepted))
    state = jnp.where(plan.fresh[:, None, None, None], 0, state)
    inputs = recurrence_inputs(rows, window, weights, lower_bound)

    def advance(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, *rest = row
        state, _ = delta_step(state, *rest)
        return state, jnp.sum(state * query[..., None, :], axis=-1)

    recurrence = (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)
    _, core = jax.lax.scan(advance, state, tuple(jnp.moveaxis(leaf, 1, 0) for leaf in recurrence))
    query, key, value = jnp.split(short_conv(rows.qkv, window, weights.conv), 3, axis=-1)
    parts = {
        "kda_q": query,
        "kda_k": key,
        "kda_v": value,
        "kda_decay": inputs.decay,
        "kda_beta": inputs.beta,
        "kda_core": jnp.moveaxis(core, 0, 1),
    }
    return {name: part.reshape(-1, *part.shape[2:]) for name, part in parts.items()}
