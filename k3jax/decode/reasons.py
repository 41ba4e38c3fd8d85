"""Why a step runs on the stock path: one of a fixed set of strings, which label a metric.

No jax import, no clock, no state: every rank comes to the same answer from the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal[
    "backend",
    "platform",
    "weights",
    "no requests",
    "prefill",
    "not uniform",
    "unbuilt width",
    "cache not bound",
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Every answer of `step_reason` but None."""

Refused = Literal["backend", "platform", "weights"]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows that a step's requests bring; null requests, which only pad, do not count."""

    decoding: tuple[int, ...] = ()  # of each request: its last token, then drafts
    prefilling: tuple[int, ...] = ()  # of each request: a chunk of its prompt


def step_reason(
    batch: BatchRows,
    builds: Iterable[tuple[int, int]],
    bound: bool,
    *,
    refused: Refused | None = None,
) -> Reason | None:
    """Why a step is not specialized, or None: it is.

    `builds` are the compiled specialized steps as (rows of each request, requests); `bound` says
    whether the kernels are bound to the cache that the step will use. `refused` is what rules out
    every specialized step of this process: the backend asked for, the platform, or the weights.
    The first reason of REASONS that holds is given: the lasting ones come before the passing ones.
    A prompt's chunk is never a decode, whatever its length.
    """
    if refused is not None:
        return refused
    if not batch.decoding and not batch.prefilling:
        return "no requests"
    if batch.prefilling:
        return "prefill"
    rows, requests = batch.decoding[0], len(batch.decoding)
    if any(other != rows for other in batch.decoding):
        return "not uniform"
    if not any(rows == built and requests <= most for built, most in builds):
        return "unbuilt width"
    return None if bound else "cache not bound"
