"""A step on its way: what the host will read of it, and how that becomes deltas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from k3jax.decode.reasons import BatchRows
from k3jax.prefix import Entry
from k3jax.request import Delta, TokenLogprob
from k3jax.scheduler import Decode, Prefill, Sequence

ALWAYS = ("tokens", "count", "nonfinite")
LOGPROBS = ("logprobs", "top_ids", "top_logprobs")
PROMPT_LOGPROBS = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step whose results are on their way to the host."""

    number: int  # of the step, from 1
    decision: Prefill | Decode
    sequences: list[Sequence]
    sources: list[Entry | None]  # of each, when it was dispatched
    outputs: dict[str, jax.Array]


def sequences_of(decision: Prefill | Decode) -> list[Sequence]:
    """The sequences of a decided step."""
    if isinstance(decision, Prefill):
        return [chunk.sequence for chunk in decision.chunks]
    return decision.sequences


def samples(decision: Prefill | Decode, index: int) -> bool:
    """Whether the step gives its sequence of that index a token; a prompt's last chunk does."""
    return isinstance(decision, Decode) or decision.chunks[index].final


def follow(sequence: Sequence, tokens: list[int]) -> str | None:
    """Move a sequence's grammar on by what it says of a step's tokens; why it cannot, if so."""
    if sequence.matcher is None:
        return None
    tokens = tokens[: sequence.max_tokens - sequence.generated]
    stops = (place for place, token in enumerate(tokens) if token in sequence.stop_ids)
    sequence.matcher.advance(tokens[: next(stops, len(tokens)) + 1])
    return sequence.matcher.error


def rows_of(decision: Prefill | Decode) -> BatchRows:
    """The rows that a decided step brings, for the choice of its path."""
    if isinstance(decision, Prefill):
        return BatchRows(prefilling=tuple(chunk.count for chunk in decision.chunks))
    return BatchRows(decoding=(decision.rows,) * len(decision.sequences))


def logprobs_of(tokens: list[int], found: list[np.ndarray], wanted: int) -> list[Any]:
    """One TokenLogprob a token of (logprobs [T], top ids [T, 20], top logprobs [T, 20])."""
    own, ids, values = (array.tolist() for array in found)
    return [
        TokenLogprob(token, own[row], list(zip(ids[row], values[row], strict=True))[:wanted])
        for row, token in enumerate(tokens)
    ]


def delta_of(sequence: Sequence, **fields: Any) -> Delta:
    """A delta with the request's counts filled in."""
    stopped = fields.get("stop_token") is not None
    return Delta(
        request_id=sequence.request_id,
        prompt_tokens=sequence.prompt_length,
        cached_tokens=sequence.cached or 0,
        completion_tokens=sequence.generated + stopped,
        **fields,
    )
