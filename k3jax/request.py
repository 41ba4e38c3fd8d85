"""What a request asks for and what the engine answers, as msgspec structs; ids only, never text."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_LOGIT_BIAS = 300  # entries in logit_bias
MAX_STOP_IDS = 32  # stop_token_ids together with the model's own end tokens
MAX_LOGPROBS = 20  # alternatives reported beside each token

FinishReason = Literal["stop", "length", "abort", "error"]


def _check(name: str, value: float | int, low: float, high: float, open_low: bool = False) -> None:
    """Raise ValueError unless low <= value <= high (or low < value); NaN never passes."""
    if (low < value if open_low else low <= value) and value <= high:
        return
    bracket = "(" if open_low else "["
    raise ValueError(f"{name} must be in {bracket}{low}, {high}], got {value}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled; a field out of range raises ValueError.

    Presence and frequency penalties count generated tokens; the repetition penalty looks at prompt
    and generated tokens. Log probabilities are those of the raw logits: before temperature,
    penalties, bias and cut-offs.
    """

    temperature: float = 1.0  # 0 is greedy: the argmax, the lowest id on ties
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the engine
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # the model's own end tokens do not stop
    min_tokens: int = 0  # no stop token is sampled before so many tokens
    max_tokens: int | None = None  # None: up to the context
    logprobs: int | None = None  # alternatives beside each generated token; 0: the token's only
    prompt_logprobs: int | None = None
    grammar: str | None = None  # what the answer must follow, as k3jax.guided reads it

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("top_k", self.top_k, -1, 2**31 - 1)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
            _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check("number of logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        _check("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_IDS)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if logit_bias or stop_token_ids name an id not in [0, vocab_size)."""
        for token in self.logit_bias:
            _check("token id in logit_bias", token, 0, vocab_size - 1)
        for token in self.stop_token_ids:
            _check("token id in stop_token_ids", token, 0, vocab_size - 1)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the prompt's token ids and how to go on from them; the id is the caller's.

    With `generated` an answer goes on that another engine began; its seed must be given.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = SamplingParams()
    generated: list[int] = []

    def room(self, vocab_size: int, max_context: int) -> int:
        """The tokens that it may generate; ValueError if its prompt leaves too few."""
        prompt, wanted = len(self.prompt_ids), self.params.max_tokens
        known = self.prompt_ids + self.generated
        wrong = next((token for token in known if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} of the prompt is not in [0, {vocab_size})")
        if not 0 < prompt < max_context:
            raise ValueError(
                f"a prompt must have 1 to {max_context - 1} tokens (max_context - 1), got {prompt}"
            )
        if wanted is None:
            return max_context - prompt
        if wanted > max_context - prompt:
            raise ValueError(
                f"max_tokens {wanted} and a prompt of {prompt} tokens exceed max_context "
                f"{max_context}: at most {max_context - prompt} can be generated"
            )
        return wanted


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token's natural log probability and its `logprobs` most probable rivals, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step brought one request.

    The token that stops a request is in `stop_token` and in `completion_tokens` (usage), never in
    `token_ids` nor in `logprobs`; its own is `stop_logprob`, if asked for. The delta with a
    `finish_reason` is the request's last one.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, whole; the first is None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    stop_token: int | None = None  # with finish_reason "stop"
    stop_logprob: TokenLogprob | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, not computed again
    completion_tokens: int = 0  # generated so far, the stop token included


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine stands, and counters since its start."""

    waiting: int
    running: int
    slots_in_use: int
    slots: int
    pages_in_use: int
    pages: int
    prompt_tokens: int  # computed; those computed again after a preemption count again
    generated_tokens: int
    preemptions: int
    finished: dict[str, int]  # by finish reason
    steps: dict[str, int]  # by "path/reason"
    prefix_queries: int = 0  # tokens of admitted requests that were looked up
    prefix_hits: int = 0  # of these, tokens that were found and not computed
    prefix_entries: int = 0
    prefix_bytes: int = 0  # on each device
    prefix_evictions: int = 0
