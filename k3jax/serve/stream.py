"""What completions and chat share: one stream of chunks, and the count of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from k3jax.request import Delta
from k3jax.serve.client import Generation
from k3jax.serve.log import note
from k3jax.serve.replies import (
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Usage,
)

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Piece = TypeVar("Piece", covariant=True)
AnyPiece = TypeVar("AnyPiece")
Chunk = TypeVar("Chunk")
UsageField = Usage | UnsetType | None


@dataclass(frozen=True)
class Head:
    """What is the same in every chunk of a reply."""

    id: str
    created: int
    model: str


@dataclass
class Tally:
    """Tokens of one choice."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0

    def add(self, delta: Delta) -> None:
        """Count a delta, the stop token included; tokens after a step's first were drafts."""
        self.prompt, self.cached = delta.prompt_tokens, delta.cached_tokens
        self.completion = delta.completion_tokens
        self.accepted += max(0, len(delta.token_ids) + (delta.stop_token is not None) - 1)


class Choice(Protocol[Piece]):
    """Turns the deltas of one request into pieces of a reply."""

    tally: Tally
    finish_reason: FinishReason | None

    def push(self, delta: Delta) -> Piece | None:
        """The piece that a delta brings, if any; sets `finish_reason` with the last."""


class Form(Protocol):
    """How pieces become chunks, and chunks a whole reply: the modules completions and chat."""

    ID_PREFIX: str  # of a reply's id

    def make_chunk(self, head: Head, choices: list[Any], usage: UsageField) -> Any: ...

    def fold(
        self, head: Head, chunks: AsyncIterator[Any], count: int
    ) -> Coroutine[Any, Any, Struct]: ...


async def stream_chunks(
    generation: Generation,
    choices: Sequence[Choice[AnyPiece]],
    make: Callable[[list[AnyPiece], UsageField], Chunk],
    *,
    include_usage: bool,
    choices_per_prompt: int = 1,
) -> AsyncIterator[Chunk]:
    """The only generator: a chunk for each piece, at the end one with the usage if asked for.

    `make` puts a chunk together from pieces and usage. A choice that has enough is aborted.
    """
    no_usage = None if include_usage else UNSET
    try:
        async for index, delta in generation.deltas():
            choice = choices[index]
            piece = choice.push(delta)
            if choice.finish_reason is not None and delta.finish_reason is None:
                generation.stop(index)
            if piece is not None:
                yield make([piece], no_usage)
    finally:
        usage = usage_of([choice.tally for choice in choices], choices_per_prompt)
        note(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    if include_usage:
        yield make([], usage)


def usage_of(tallies: Sequence[Tally], choices_per_prompt: int) -> Usage:
    """The sum over choices; choices that share a prompt count it once."""
    prompts = tallies[::choices_per_prompt]
    prompt = sum(tally.prompt for tally in prompts)
    completion = sum(tally.completion for tally in tallies)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(tally.cached for tally in prompts)
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(tally.reasoning for tally in tallies),
            accepted_prediction_tokens=sum(tally.accepted for tally in tallies),
        ),
    )


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(LOWEST_LOGPROB, logprob)
