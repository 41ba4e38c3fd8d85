"""Commit accepted pending rows of KDA slots."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kda_common import replay, resolve_slots
from pallas_kernels.kda_types import KdaCache


def kda_commit(
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
) -> KdaCache:
    """Replay into the state the accepted[b] pending rows before position starts[b].

    `accepted` is clamped to [0, most_rows]; 0 keeps a slot bit for bit. Slots outside [1, S) touch
    nothing. The pending rows stay: the caller sets the slots' accepted counts to zero.
    """
    slots, live, _ = resolve_slots(slots, cache.state.shape[0])
    _, state = replay(cache, slots, starts, jnp.where(live, accepted, 0))
    return dataclasses.replace(cache, state=cache.state.at[slots].set(state))
