"""What clients ask: OpenAI's requests and the common extensions, checked field by field.

Types are strict and ranges checked, so a bad field is a 400 that names it; unknown fields are
ignored, as OpenAI-compatible servers do; known fields that this server lacks are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3jax.chat import EFFORTS
from k3jax.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from k3jax.serve.errors import bad_request, not_offered

DEFAULT_TOP_P = 0.95  # the released model's own default, as is temperature 1
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 24
MAX_CHOICES = 128
INT32 = 2**31 - 1
T = TypeVar("T")

CONSTRAINED = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "ebnf",
    "regex",
    "json_schema",
)
"""Fields by which other servers constrain the output."""

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]


class Strict(BaseModel):
    """No coercion, no NaN; unknown fields pass."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationRequest(Strict):
    """The fields that completions and chat share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
        ]
        | None
    ) = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_constrained(cls, data: Any) -> Any:
        for name in CONSTRAINED if isinstance(data, dict) else ():
            if data.get(name) is not None:
                raise not_offered("constrained output (JSON, regular expression, grammar)", name)
        return data

    @field_validator("logit_bias")
    @classmethod
    def _token_keys(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError("the keys must be token ids")
        return bias

    @property
    def stops(self) -> list[str]:
        """Stop strings, however they were given."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; None: up to the context."""
        return self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """Alternatives to report beside each token; None: no log probabilities."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ApiError for what is well-formed but not offered or contradictory."""
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind in ("json_object", "json_schema", "regex", "grammar", "structural_tag"):
            raise not_offered(f"constrained output (type {kind!r})", "response_format")
        if kind != "text":
            raise bad_request("response_format.type must be 'text'", "response_format")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options goes with stream = true only", "stream_options")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise bad_request(f"min_tokens is above the limit of {limit} tokens", "min_tokens")

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """How to sample choice number `choice`: with a seed, each choice has one of its own."""
        try:
            return SamplingParams(
                temperature=_or(self.temperature, 1.0),
                top_p=_or(self.top_p, DEFAULT_TOP_P),
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                seed=None if self.seed is None else _wrap(self.seed + choice),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=_or(self.repetition_penalty, 1.0),
                logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
                stop_token_ids=sorted(set(self.stop_token_ids or ())),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                max_tokens=max_tokens,
                logprobs=self.logprob_count,
            )
        except ValueError as error:
            raise bad_request(str(error)) from error


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1),
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever of the four forms they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def token_limit(self) -> int | None:
        return _or(self.max_tokens, 16)  # OpenAI's default

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise not_offered("best_of other than n", "best_of")
        if self.suffix:
            raise not_offered("suffix", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens must be at least 1, or 0 with echo", "max_tokens")


class ContentPart(Strict):
    """A part of a message's content; only text is read."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> Self:
        if self.type != "text":
            what = "images are" if "image" in self.type else f"a part of type {self.type!r} is"
            raise ValueError(f"{what} not supported: this server reads text only")
        if self.text is None:
            raise ValueError("a part of type 'text' must have a text")
        return self


class FunctionCall(Strict):
    """A call that the assistant made; arguments are JSON text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """One of an assistant message's calls."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Function(Strict):
    """What a tool is called and takes; further keys go to the model as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def _not_strict(cls, strict: bool | None) -> bool | None:
        if strict:
            raise ValueError("constrained arguments are not offered by this server")
        return strict


class Tool(Strict):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class ChatMessage(Strict):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Tool] | None = None  # a system message may declare more of them

    def rendered(self) -> dict[str, Any]:
        """The message as the chat format reads it."""
        message = self.model_dump(exclude_none=True, exclude={"tools"})
        if self.tools:
            message["tools"] = tools_as_given(self.tools)
        if self.role == "developer":
            message["role"] = "system"
        return message


class Thinking(Strict):
    """Whether to think before the answer, as Kimi's own service has it."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(Strict):
    """`chat_template_kwargs` of other servers, as far as they apply."""

    thinking: bool | None = None
    thinking_effort: Literal["low", "medium", "high", "max"] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    reasoning_effort: Literal["none", "low", "medium", "high", "max"] | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def token_limit(self) -> int | None:
        return _or(self.max_completion_tokens, self.max_tokens)

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinks(self) -> bool:
        """Whether the model is to think; it does unless told not to."""
        asked = self.thinking.type == "enabled" if isinstance(self.thinking, Thinking) else None
        asked = self.thinking if isinstance(self.thinking, bool) else asked
        in_template = self.chat_template_kwargs and self.chat_template_kwargs.thinking
        return self.reasoning_effort != "none" and asked is not False and in_template is not False

    @property
    def effort(self) -> str:
        """How much to think."""
        in_template = self.chat_template_kwargs and self.chat_template_kwargs.thinking_effort
        return self.reasoning_effort or in_template or EFFORTS[-1]

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs goes with logprobs = true only", "top_logprobs")
        if isinstance(self.tool_choice, dict):
            raise not_offered("a tool_choice that names one tool", "tool_choice")
        declared = self.tools or any(message.tools for message in self.messages)
        if self.tool_choice == "required" and not declared:
            raise bad_request("tool_choice 'required' needs tools", "tool_choice")


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions would render it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def tools_as_given(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as the client wrote them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools or ()]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _wrap(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
