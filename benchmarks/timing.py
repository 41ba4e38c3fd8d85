"""Device time of a jitted function, from the profiler's trace.

The host spends about 2.6 us on each argument of a call (H200, JAX 0.11.2), more than a small
kernel takes: the wall clock times the host. So every time here is read from the GPU's own
timestamps. A function is unrolled over sets of distinct arrays of more than 200 MB together, so
that no weight comes out of the cache, and the unrolled program is captured as one CUDA graph.
MAX_SETS sets of less than 1 MB each are fewer bytes, and may come out of the cache.

A program on several GPUs is as slow as its slowest one. Each has a time of its own, in which the
reductions hold what it waited for the others; the GPUs do not start at once.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Several times the 60 MB second-level cache of an H200. An MI355X (256 MB) wants more.
ROTATION_BYTES = 256 << 20
MAX_SETS = 256  # of which the unrolled program grows
REPEATS = 5
PAUSE = 0.02  # seconds of silence that part one run from the next in the trace
# Otherwise XLA launches kernel by kernel while a profiler looks on.
KEEP_GRAPHS = {"xla_enable_command_buffers_during_profiling": True}


class Event(NamedTuple):
    """A kernel, copy or fill; start and end in seconds."""

    name: str
    start: float
    end: float
    device: str = ""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one application takes on the device, in seconds; medians. Of several, the slowest."""

    seconds: float  # first start to last end of all applications, by their number: gaps included
    kernels: float  # the sum of its kernels' durations
    launches: float  # kernels, copies and fills of one application
    parts: dict[str, float]  # kernel name -> its share of `kernels`
    spread: float  # of `seconds`: the largest minus the smallest run
    by_device: tuple[float, ...]  # `seconds` of each device, the slowest last


@dataclasses.dataclass
class Program:
    """A function compiled over its sets."""

    compiled: jax.stages.Compiled
    states: list  # the donated arguments, handed on from run to run
    others: list
    common: tuple  # arguments of every application
    count: int  # applications

    def run(self) -> Any:
        """Run all applications once, wait for them, and return what they gave beside states."""
        self.states, results = self.compiled(self.states, self.others, self.common)
        jax.block_until_ready((self.states, results))
        return results


def require_gpu() -> None:
    """Raise NotImplementedError where there is no GPU to time, before anything large is made."""
    platform = jax.devices()[0].platform
    if platform != "gpu":
        raise NotImplementedError(
            f"device times are read from a GPU's trace, and JAX runs on a {platform} here: "
            "install the extra `cuda` or `rocm` on a machine with a GPU"
        )


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
    function: Callable[..., Any],
    sets: Sequence[tuple],
    *,
    carry: bool = False,
    common: tuple = (),
    merge: Callable[[list], Any] = list,
) -> Program:
    """Compile `function(*arguments, *common)` unrolled over `sets`; may run in many threads.

    With `carry`, the first argument of each set is state: `function(state, ...) -> (state, out)`;
    it is donated and handed on, as a decode step does with its cache. What is made of `common`
    alone is made once; `merge` makes one result of all.
    """
    step = jax.jit(function)

    def all_sets(states: list, others: list, common: tuple) -> tuple[list, Any]:
        results = [
            step(state, *other, *common) if carry else (None, step(*other, *common))
            for state, other in zip(states, others, strict=True)
        ]
        return [state for state, _ in results], merge([out for _, out in results])

    states = [arguments[0] if carry else None for arguments in sets]
    others = [arguments[1:] if carry else arguments for arguments in sets]
    jitted = jax.jit(all_sets, donate_argnums=0, keep_unused=True)
    compiled = jitted.lower(states, others, common).compile(compiler_options=KEEP_GRAPHS)
    states = jax.tree.map(jnp.copy, states)  # the donation must not eat the caller's arrays
    return Program(compiled, states, others, common, len(sets))


def device_time(
    function: Callable[..., Any], sets: Sequence[tuple], *, carry: bool = False
) -> Timing:
    """Time one application of `function(*arguments)`, each of `sets` in turn; see compile_over."""
    return device_times([compile_over(function, sets, carry=carry)])[0]


def device_times(programs: Sequence[Program]) -> list[Timing]:
    """Time compiled programs one after another; one trace serves all of them.

    Raises RuntimeError where the trace does not show the runs (on a CPU, say).
    """
    for program in programs:
        for _ in range(3):  # XLA captures a graph in the first runs
            program.run()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for program in programs:
                for _ in range(REPEATS):
                    time.sleep(PAUSE)
                    program.run()
        runs = split_runs(_device_events(Path(directory)))
    if len(runs) != len(programs) * REPEATS:
        raise RuntimeError(f"the trace shows {len(runs)} runs of {len(programs) * REPEATS}")
    return [
        _timing(program.count, runs[index * REPEATS : (index + 1) * REPEATS])
        for index, program in enumerate(programs)
    ]


def _device_events(directory: Path) -> list[Event]:
    """Everything that ran on the GPUs' streams, by its start."""
    events = []
    for path in directory.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        events += [
                            Event(
                                e.name,
                                e.start_ns * 1e-9,
                                (e.start_ns + e.duration_ns) * 1e-9,
                                plane.name,
                            )
                            for e in line.events
                        ]
    return sorted(events, key=lambda event: event.start)


def split_runs(events: Sequence[Event]) -> list[list[Event]]:
    """Part events, ordered by start, where nothing ran on any device for half of PAUSE."""
    runs: list[list[Event]] = []
    end = float("-inf")
    for event in events:
        if event.start - end > PAUSE / 2:
            runs.append([])
        runs[-1].append(event)
        end = max(end, event.end)
    return runs


def _timing(count: int, runs: list[list[Event]]) -> Timing:
    """Sum up a program's runs of `count` applications; RuntimeError if devices sat one out."""
    devices = sorted({event.device for run in runs for event in run})
    parted = [[[e for e in run if e.device == device] for run in runs] for device in devices]
    for device, own in zip(devices, parted, strict=True):
        if not all(own):
            raise RuntimeError(f"the trace shows {device} in {sum(map(bool, own))} of {len(own)}")
    found = sorted((_device_timing(count, own) for own in parted), key=lambda each: each.seconds)
    return dataclasses.replace(found[-1], by_device=tuple(each.seconds for each in found))


def _device_timing(count: int, runs: list[list[Event]]) -> Timing:
    """Sum up one device's runs of `count` applications."""
    spans = [(max(event.end for event in run) - run[0].start) / count for run in runs]
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for run in runs:
        for event in run:
            durations[event.name].append(event.end - event.start)
    share = 1 / (len(runs) * count)
    parts = {name: statistics.median(each) * len(each) * share for name, each in durations.items()}
    return Timing(
        seconds=statistics.median(spans),
        kernels=sum(parts.values()),
        launches=sum(len(run) for run in runs) * share,
        parts=parts,
        spread=max(spans) - min(spans),
        by_device=(statistics.median(spans),),
    )


def read_bandwidth() -> float:
    """Bytes a second that a plain reduction reads from device memory: the ceiling."""
    shape = (16384, 16384)
    make = jax.jit(lambda seed: (jnp.full(shape, seed, jnp.int32),))
    sets = make_sets(lambda seed: make(jnp.int32(seed + 1)), 4)
    return tree_bytes(sets[0]) / device_time(lambda array: jnp.max(array, axis=1), sets).seconds


def matrix_rate() -> float:
    """Floating-point operations a second of a bf16 product of 8192 x 8192 matrices."""
    size = 8192
    keys = jax.random.split(jax.random.key(0), 4)
    make = jax.jit(lambda key: (jax.random.normal(key, (size, size), jnp.bfloat16),) * 2)
    sets = [make(key) for key in keys]
    return 2 * size**3 / device_time(lambda a, b: a @ b.T, sets).seconds
