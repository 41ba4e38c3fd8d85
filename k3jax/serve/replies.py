"""What the server answers: OpenAI's replies and stream chunks.

A field that is UNSET is left out of the JSON, so that `null` is said where OpenAI says it and
nowhere else.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Of the generated tokens; accepted predictions are drafts of speculative decoding."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


class PromptToken(msgspec.Struct, kw_only=True):
    """A token that stands, or might have stood, in the prompt; the most probable has rank 1."""

    logprob: float
    rank: int | None  # None: below those that were asked for
    decoded_token: str


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET  # the stop string or stop_token_id that ended it
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET  # by id, once


class Completion(msgspec.Struct, kw_only=True):
    """Reply and chunk of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token and how probable it was."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob, kw_only=True):
    """A token of the answer and its rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the answer's tokens; those of the reasoning are not among them."""

    content: list[TokenLogprobs]


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call's function, or the next piece of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call, or the next piece of one; only a piece has an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, as newer clients call it
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The next piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """Chunk of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """A whole answer."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, as newer clients call it
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One whole answer and how it ended."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None


class ModelCard(msgspec.Struct, kw_only=True):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "k3jax"
    max_model_len: int | None


class ModelList(msgspec.Struct, kw_only=True):
    """Reply of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
