"""How a model is run: the one config of everything between checkpoint and request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DecodeBackend = Literal["auto", "specialized", "stock"]
DTYPES = ("bfloat16", "float32")
BACKENDS = ("auto", "specialized", "stock")
IMPLS = ("reference", "pallas", "interpret")


def ladder(limit: int) -> tuple[int, ...]:
    """1, 4, 16, ... below `limit`, then `limit` itself."""
    return (*(4**n for n in range(limit.bit_length()) if 4**n < limit), limit)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a model is run; a field out of range raises ValueError.

    `builds` are the uniform decode steps that get compiled, as (rows of each request, requests);
    `prefill_buckets` the prefill steps, as (requests, tokens of each). Left empty they are made
    from the other fields. A step with fewer requests or tokens is padded to the next one.
    """

    dtype: str = "bfloat16"  # of activations, conv windows and latents; float32 to prove exactness
    tp: int = 1
    max_requests: int = 16  # running at a time
    max_context: int = 8192  # tokens of one request, prompt and answer
    page_size: int = 64  # tokens
    cache_memory: int | None = None  # bytes on each device; None: what is left, or enough on a CPU
    decode_backend: DecodeBackend = "auto"
    impl: Literal["reference", "pallas", "interpret"] = "reference"  # of prefill and stock steps
    num_spec: int = 0  # drafts of each request in a decode step
    builds: tuple[tuple[int, int], ...] = ()
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    check_every: int = 16  # steps between two agreements on health
    step_timeout: float = 60.0  # seconds until a step that has not landed ends the process
    compile_cache: str | None = None  # directory

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("decode_backend", self.decode_backend, BACKENDS)
        _one_of("impl", self.impl, IMPLS)
        for name in ("tp", "max_requests", "max_context", "page_size", "check_every"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_spec", self.num_spec, 0)
        if self.step_timeout <= 0:
            raise ValueError(f"step_timeout is in seconds and above 0, got {self.step_timeout}")
        if not self.builds:
            object.__setattr__(self, "builds", self._default_builds())
        if not self.prefill_buckets:
            object.__setattr__(self, "prefill_buckets", self._default_buckets())
        for rows, requests in self.builds:
            if not 1 <= rows <= self.pending or not 1 <= requests <= self.max_requests:
                raise ValueError(
                    f"build ({rows}, {requests}) must have 1 to {self.pending} rows (num_spec + 1) "
                    f"and 1 to {self.max_requests} requests (max_requests)"
                )
        if not any(requests == self.max_requests for _, requests in self.builds):
            raise ValueError(f"no build holds all of max_requests = {self.max_requests}")
        for requests, tokens in self.prefill_buckets:
            _at_least("requests of a prefill bucket", requests, 1)
            _at_least("tokens of a prefill bucket", tokens, 1)

    @property
    def slots(self) -> int:
        """Slots of the cache, the null slot included."""
        return self.max_requests + 1

    @property
    def pending(self) -> int:
        """Rows of the widest decode step for one request."""
        return self.num_spec + 1

    @property
    def max_pages(self) -> int:
        """Pages of one request; a draft may be verified just beyond the context."""
        return -(-(self.max_context + self.num_spec) // self.page_size)

    def _default_builds(self) -> tuple[tuple[int, int], ...]:
        rows = sorted({1, self.pending})
        return tuple((q, requests) for q in rows for requests in ladder(self.max_requests))

    def _default_buckets(self) -> tuple[tuple[int, int], ...]:
        longest = min(2048, self.max_context)
        single = [tokens for tokens in (32, 256) if tokens < longest] + [longest]
        batch = min(4, self.max_requests)
        several = ((batch, min(256, longest)),) if batch > 1 else ()
        return (*((1, tokens) for tokens in single), *several)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be {low} or more, got {value}")
