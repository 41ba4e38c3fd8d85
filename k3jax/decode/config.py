"""How a model is run: the one config of everything between checkpoint and request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3jax.decode.faults import Fault

DecodeBackend = Literal["auto", "specialized", "stock"]
DTYPES = ("bfloat16", "float32")
BACKENDS = ("auto", "specialized", "stock")
OpsImpl = Literal["reference", "pallas", "interpret"]
IMPLS = ("reference", "pallas", "interpret")
WIDEST_DRAFTED = 64  # rows of a default build: each row of a wider step reads experts of its own


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
    prefix_cache: int | None = None  # bytes on each device; None: a share of the above; 0: off
    decode_backend: DecodeBackend = "auto"
    impl: OpsImpl | None = None  # of all but stock decode steps; None: pallas where it compiles
    num_spec: int = 0  # most drafts of each request in a decode step
    drafter: str = "none"  # ngram, or a draft model's directory; none: the caller sends drafts
    builds: tuple[tuple[int, int], ...] = ()
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    check_every: int = 16  # steps between two agreements on health
    step_timeout: float = 60.0  # seconds until a step that has not landed ends the process
    inject_fault: str | None = None  # RANK:STEP:BIT
    compile_cache: str | None = None  # directory

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("decode_backend", self.decode_backend, BACKENDS)
        if self.impl is not None:
            _one_of("impl", self.impl, IMPLS)
        for name in ("tp", "max_requests", "max_context", "page_size", "check_every"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_spec", self.num_spec, 0)
        if self.prefix_cache is not None:
            _at_least("prefix_cache", self.prefix_cache, 0)
        if self.drafter != "none" and not self.num_spec:
            raise ValueError(f"drafter {self.drafter} needs num_spec of 1 or more")
        if self.step_timeout <= 0:
            raise ValueError(f"step_timeout is in seconds and above 0, got {self.step_timeout}")
        if self.fault is not None and self.fault.rank >= self.tp:
            raise ValueError(f"inject_fault {self.inject_fault}: there are {self.tp} ranks (tp)")
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
            raise ValueError(
                f"no build holds all of max_requests = {self.max_requests}: add one to the builds, "
                f"as 1x{self.max_requests}"
            )
        for requests, tokens in self.prefill_buckets:
            _at_least("requests of a prefill bucket", requests, 1)
            _at_least("tokens of a prefill bucket", tokens, 1)

    @property
    def fault(self) -> Fault | None:
        """The fault to inject, if any."""
        return None if self.inject_fault is None else Fault.parse(self.inject_fault)

    @property
    def slots(self) -> int:
        """Slots of the cache, the null slot included."""
        return self.max_requests + 1

    @property
    def pending(self) -> int:
        """Rows of the widest decode step for one request."""
        return self.num_spec + 1

    @property
    def lookahead(self) -> int:
        """Tokens beyond a decode step's own for which each request has pages: a draft model's."""
        return 0 if self.drafter in ("none", "ngram") else self.pending + 1

    @property
    def max_pages(self) -> int:
        """Pages of one request; a draft may be made and verified just beyond the context."""
        return -(-(self.max_context + self.num_spec + self.lookahead) // self.page_size)

    @property
    def history(self) -> int:
        """Tokens of one request that a drafter can read: all that fit its pages, and the next."""
        return 0 if self.drafter == "none" else self.max_pages * self.page_size + 1

    def _default_builds(self) -> tuple[tuple[int, int], ...]:
        """Drafts for as many requests as leave a step narrow, and plain decode for all."""
        widths = ladder(self.max_requests)
        builds = [(1, requests) for requests in widths]
        if self.num_spec:
            drafted = (n for n in widths if n == 1 or n * self.pending <= WIDEST_DRAFTED)
            builds += [(self.pending, requests) for requests in drafted]
        return tuple(builds)

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
