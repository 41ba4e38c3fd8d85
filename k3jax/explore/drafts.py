"""Speculation from the outside: what a request's steps brought, how fast, and on which path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3jax.lm import LanguageModel


@dataclass(frozen=True)
class Run:
    """What the decode steps of one request did."""

    tokens: list[int]  # of each step: the token of its own and the accepted drafts
    seconds: float
    steps: dict[str, int]  # by "path/reason", prefill steps included

    @property
    def tokens_per_step(self) -> float:
        """In the mean."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """By the wall clock."""
        return sum(self.tokens) / self.seconds


def run(lm: LanguageModel, prompt: str | Sequence[int], max_tokens: int) -> Run:
    """Generate `max_tokens` tokens greedily, whatever they say, and keep account of the steps.

    The last step is left out: it may have been cut. The clock starts with the first token.
    """
    before = lm.engine.stats().steps
    counts, times = [], []
    for ids in lm.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
        counts.append(len(ids))
        times.append(time.perf_counter())
    if len(counts) < 3:
        raise ValueError(f"{max_tokens} tokens are too few: they took {len(counts)} steps")
    after = lm.engine.stats().steps
    taken = {name: count - before.get(name, 0) for name, count in after.items()}
    # The first tokens are the prefill's.
    return Run(counts[1:-1], times[-2] - times[0], {k: v for k, v in taken.items() if v})


def acceptance(tokens: Sequence[int], drafts: int) -> np.ndarray:
    """The share of steps, in percent, that accepted a draft at each position [drafts].

    `tokens` are those of each step; a draft is accepted only with all before it.
    """
    accepted = np.asarray(tokens) - 1
    return 100 * np.array([(accepted >= place).mean() for place in range(1, drafts + 1)])
