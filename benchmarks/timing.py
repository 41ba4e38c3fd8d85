"""Device time of a jitted function, as its share of what the memory can do.

Every measurement rotates over sets of distinct arrays of more than 200 MB together: a weight that
is read twice in a row comes out of the cache, and then the cache is what was timed. The rotation
is unrolled into one jitted function, which XLA captures as a CUDA graph.

The host spends about 2.6 us on each argument of a call (H200, JAX 0.11.2), so an op whose set is
small is timed at what the host takes: compare with `dispatch_floor`, and use a profiler below it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Several times the 60 MB second-level cache of an H200. An MI355X (256 MB) wants more.
ROTATION_BYTES = 256 << 20
MAX_SETS = 256


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one application: median and the spread (largest - smallest) of repetitions."""

    seconds: float
    spread: float

    @property
    def microseconds(self) -> float:
        return self.seconds * 1e6


def tree_bytes(tree: Any) -> int:
    """Bytes of all the arrays (or ShapeDtypeStructs) of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def rotation(set_bytes: int) -> int:
    """How many distinct sets of `set_bytes` bytes outlast the cache."""
    return max(2, min(MAX_SETS, -(-ROTATION_BYTES // max(set_bytes, 1))))


def make_sets(make: Callable[[int], tuple], count: int | None = None) -> list[tuple]:
    """`make(seed)` -> the arguments of one application; as many as the rotation needs."""
    first = jax.block_until_ready(make(0))
    if count is None:
        count = rotation(tree_bytes(first))
    sets = [first] + [make(seed) for seed in range(1, count)]
    return jax.block_until_ready(sets)


def compile_over(
    function: Callable[..., Any], sets: Sequence[tuple], *, carry: bool = False
) -> jax.stages.Compiled:
    """Compile `function` unrolled over `sets`, for `device_time`; may run in many threads.

    Its first argument is a list of old results, donated: the new ones take their memory. A result
    at a new address would make XLA rebuild the graph, which takes longer than a small kernel.
    """
    step = jax.jit(function)

    def all_sets(states: list, old: list, others: list) -> tuple[list, list]:
        del old
        results = [
            step(state, *other) if carry else (None, step(*other))
            for state, other in zip(states, others, strict=True)
        ]
        return [state for state, _ in results], [out for _, out in results]

    states, others = _split(sets, carry)
    shapes = jax.eval_shape(lambda s, o: all_sets(s, [], o), states, others)[1]
    jitted = jax.jit(all_sets, donate_argnums=(0, 1), keep_unused=True)
    return jitted.lower(states, shapes, others).compile()


def _split(sets: Sequence[tuple], carry: bool) -> tuple[list, list]:
    states = [arguments[0] if carry else None for arguments in sets]
    return states, [arguments[1:] if carry else arguments for arguments in sets]


def device_time(
    function: Callable[..., Any],
    sets: Sequence[tuple],
    *,
    carry: bool = False,
    compiled: jax.stages.Compiled | None = None,
    repeats: int = 5,
    budget: float = 0.02,
) -> Timing:
    """Time `function(*arguments)` over `sets`, one application after another.

    With `carry`, the first argument of each set is state: `function(state, ...) -> (state, out)`;
    it is donated and handed on, as a decode step does with its cache. `budget` is the seconds of
    one repetition. Calls are dispatched without waiting, and waited for once.
    """
    compiled = compiled or compile_over(function, sets, carry=carry)
    states, others = _split(sets, carry)
    states = jax.tree.map(jnp.copy, states)  # the donation must not eat the caller's arrays
    step = jax.jit(function)
    shapes = [jax.eval_shape(step, *arguments) for arguments in sets[:1]]
    out_shape = shapes[0][1] if carry else shapes[0]
    out = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out_shape) for _ in sets]

    def run(times: int) -> float:
        nonlocal states, out
        start = time.perf_counter()
        for _ in range(times):
            states, out = compiled(states, out, others)
        jax.block_until_ready((states, out))
        return (time.perf_counter() - start) / times / len(sets)

    run(3)
    calls = max(2, min(200, int(budget / max(run(2) * len(sets), 1e-6))))
    samples = [run(calls) for _ in range(repeats)]
    return Timing(statistics.median(samples), max(samples) - min(samples))


def dispatch_floor(sets: Sequence[tuple]) -> float:
    """Seconds an application takes that only looks at its arguments: no op on `sets` reads less."""
    return device_time(lambda *leaves: jax.tree.leaves(leaves)[0].reshape(-1)[:1], sets).seconds


def read_bandwidth() -> float:
    """Bytes a second that a plain reduction reads from device memory: the ceiling."""
    words = 256 << 20
    make = jax.jit(lambda seed: (jnp.arange(words, dtype=jnp.int32) * seed,))
    sets = make_sets(lambda seed: make(jnp.int32(seed + 1)), 4)
    timing = device_time(lambda array: jnp.max(array), sets)
    return words * 4 / timing.seconds


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of a benchmark's table; `bytes` is the least that must move."""

    name: str
    bytes: int
    seconds: float
    peers: dict[str, float] = dataclasses.field(default_factory=dict)

    def text(self, bandwidth: float) -> str:
        ceiling = self.bytes / bandwidth
        peers = "  ".join(
            f"{name} {seconds * 1e6:.1f} us ({seconds / self.seconds:.2f}x)"
            for name, seconds in self.peers.items()
        )
        return (
            f"{self.name:44} {self.bytes / 1e6:8.2f} MB  ceiling {ceiling * 1e6:7.2f} us  "
            f"ours {self.seconds * 1e6:7.2f} us  {100 * ceiling / self.seconds:5.1f}%  {peers}"
        )

    def record(self, bandwidth: float) -> dict:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "ceiling_us": self.bytes / bandwidth * 1e6,
            "us": self.seconds * 1e6,
            "percent": 100 * self.bytes / bandwidth / self.seconds,
            "peers_us": {name: seconds * 1e6 for name, seconds in self.peers.items()},
        }
