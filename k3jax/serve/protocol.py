"""What clients ask: OpenAI's requests and the common extensions, checked field by field.

Types are strict and ranges checked, so a bad field is a 400 that names it; unknown fields are
ignored, as OpenAI-compatible servers do; known fields that this server lacks are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3jax.chat.constrain import Form
from k3jax.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from k3jax.serve.errors import bad_request, not_offered
from k3jax.serve.forms import StructuredOutputs, fold_aliases, only_form, response_form

DEFAULT_TOP_P = 0.95  # the released model's own default, as is temperature 1
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 24
MAX_CHOICES = 128
INT32 = 2**31 - 1
LACKING = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "continue_final_message",
    "documents",
    "function_call",
    "functions",
    "include_stop_str_in_output",
    "prompt_embeds",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "use_beam_search",
    "web_search_options",
)
"""Fields of OpenAI's or vLLM's that change an answer, and that this server does not have."""
T = TypeVar("T")

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

    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_forms(cls, data: Any) -> Any:
        refuse_lacking(data, LACKING)
        return fold_aliases(data) if isinstance(data, dict) else data

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
    def form(self) -> Form | None:
        """The form that the answer must have; ApiError if it cannot be read."""
        forms = [response_form(self.response_format)]
        forms.append(self.structured_outputs.form() if self.structured_outputs else None)
        return only_form([form for form in forms if form is not None])

    @property
    def is_held(self) -> bool:
        """Whether the answer is held to a grammar."""
        return self.form is not None

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
        if self.form is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise bad_request(f"{name} does not go with a form: the form says where to end", name)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options goes with stream = true only", "stream_options")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise bad_request(f"min_tokens is above the limit of {limit} tokens", "min_tokens")

    def sampling(self, choice: int, max_tokens: int, grammar: str | None = None) -> SamplingParams:
        """How to sample choice number `choice`: with a seed, each choice has one of its own."""
        try:
            return SamplingParams(
                temperature=value_or(self.temperature, 1.0),
                top_p=value_or(self.top_p, DEFAULT_TOP_P),
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                seed=None if self.seed is None else _wrap(self.seed + choice),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=value_or(self.repetition_penalty, 1.0),
                logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
                stop_token_ids=sorted(set(self.stop_token_ids or ())),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                max_tokens=max_tokens,
                logprobs=self.logprob_count,
                grammar=grammar,
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
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
    def scored(self) -> int | None:
        """Alternatives to find beside each token of the prompt; None: it is not scored."""
        echoed = self.logprobs if self.echo else None
        wishes = [wish for wish in (echoed, self.prompt_logprobs) if wish is not None]
        return max(wishes, default=None)

    @property
    def token_limit(self) -> int | None:
        return value_or(self.max_tokens, 16)  # OpenAI's default

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


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def refuse_lacking(data: Any, names: Sequence[str]) -> None:
    """ApiError if a body asks for one of these fields; as null, false or empty it asks nothing."""
    for name in names:
        if isinstance(data, dict) and data.get(name):
            raise not_offered(name, name)


def value_or(value: T | None, default: T) -> T:
    """A field's value, or what holds where it was not given."""
    return default if value is None else value


def _wrap(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
