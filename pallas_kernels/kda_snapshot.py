"""What a KDA layer knows of a request at one position: taken from a slot, put into another."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.kda_common import replay, resolve_slots, store_rows
from pallas_kernels.kda_types import TAPS, KdaCache, KdaSnapshot


def kda_take(
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
) -> KdaSnapshot:
    """What rows from position starts[b] on continue, with accepted[b] pending rows replayed.

    Those are the pending rows before starts[b]; behind them there may be others. `accepted` is
    clamped to [0, most_rows]. The cache stays as it is.
    """
    slots, _, _ = resolve_slots(slots, cache.state.shape[0])
    window, state = replay(cache, slots, starts, accepted)
    return KdaSnapshot(window, state)


def kda_put(
    cache: KdaCache,
    slots: jax.Array,  # i32[B], distinct
    starts: jax.Array,  # i32[B]
    snapshot: KdaSnapshot,  # of B requests
) -> KdaCache:
    """Let rows from position starts[b] on continue a snapshot that was taken there.

    Nothing is pending afterwards: the caller sets the slots' accepted counts to zero. Slots outside
    [1, S) write to the null slot.
    """
    slots, _, _ = resolve_slots(slots, cache.state.shape[0])
    first = starts - (TAPS - 1)
    return dataclasses.replace(
        cache,
        conv=store_rows(cache, cache.conv, slots, first, snapshot.window),
        state=cache.state.at[slots].set(snapshot.state),
    )
