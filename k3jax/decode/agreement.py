"""Ranks agree on the host, before any collective on devices: one rank's refusal is everyone's.

The words travel through the key-value store of jax.distributed. A collective would not do: a rank
that raised before it leaves the others in it for ever.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence

import jax
from jax._src import distributed  # the store has no public door

SECONDS = 600.0
"""How long ranks wait for the slowest: one may read its part of a checkpoint from a slow disk."""

# Keys of the store are used once, and the store outlives every object here.
_ROUNDS = itertools.count()


def exchange(word: str, what: str, *, seconds: float = SECONDS) -> list[str]:
    """Every rank's word on `what`, by rank; all processes must call alike, in the same order.

    RuntimeError if a rank's word is not there within `seconds`, or is on something else.
    """
    state = distributed.global_state
    if state.client is None:
        return [word]
    key, deadline = f"k3jax/agreement/{next(_ROUNDS)}", time.monotonic() + seconds
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps([what, word]))
    words = []
    for rank in range(state.num_processes):
        left = max(1, round(1000 * (deadline - time.monotonic())))
        try:
            found = state.client.blocking_key_value_get(f"{key}/{rank}", left)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"rank {rank} did not say within {seconds:g} s whether it agrees on {what}; "
                f"its own log says why. Restart the engine ({error})"
            ) from error
        topic, said = json.loads(found)
        if topic != what:
            raise RuntimeError(
                f"rank {rank} is at {topic} while rank {state.process_id} is at {what}: start all "
                "ranks with the same command and the same files"
            )
        words.append(said)
    return words


def agree(reasons: Sequence[str], what: str, *, seconds: float = SECONDS) -> list[str]:
    """What this rank, or else another one, has against `what`; empty on all ranks or on none.

    A rank without a reason of its own says that another rank refused, and which.
    """
    refused = [
        rank
        for rank, word in enumerate(exchange(str(len(reasons)), what, seconds=seconds))
        if int(word)
    ]
    if reasons or not refused:
        return list(reasons)
    return [f"another rank refused (rank {', '.join(map(str, refused))})"]


def agree_on_minimum(value: int, what: str, *, seconds: float = SECONDS) -> int:
    """The smallest `value` of all ranks, for what they must allocate alike."""
    return min(int(word) for word in exchange(str(value), what, seconds=seconds))


def refusal(what: str, reasons: Sequence[str]) -> ValueError:
    """The error of a specialized decode that cannot run, with every reason."""
    return ValueError(
        f"Kimi-K3 specialized decode does not support {what}: {'; '.join(reasons)} "
        "(--decode-backend auto runs the stock path)"
    )
