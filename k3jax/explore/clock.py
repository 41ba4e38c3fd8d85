"""The wall clock; benchmarks/timing.py reads a GPU's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def best_seconds(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """The shortest of some calls on the wall clock, compiled before."""
    jax.block_until_ready(function(*args))
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        spent.append(time.perf_counter() - begin)
    return min(spent)
