"""Time the kernels beside their peers: `python -m benchmarks.kernels [--case TEXT] [--tags ..]`.

Prints, per case, the least bytes (or operations) and the time they take at the ceilings measured
in the same run, our time and its percentage, and each peer's time and ratio; ends with one JSON
line. The peers are XLA on the reference, and with --peers what PEERS find installed. Rows come a
dozen at a time: cases compile together, and nothing else runs while they are timed. Needs a GPU.
Results with date and versions belong in RESULTS.md.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import rooflines, timing
from benchmarks.progress import Progress, add_limit, reason
from benchmarks.timing import tree_bytes
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import CASES, Case
from pallas_kernels.impl import Impl
from pallas_kernels.moe_types import Mxfp4Bank

# Arguments that are donated state, and where they stand in the result.
CARRIED = {"kda_decode": ("cache", 1), "kda_prefill": ("cache", 1), "moe_mono": ("control", -1)}
TOGETHER = 12  # cases compiled at once, in threads, and timed in one trace
MOST_BYTES = 40 << 30  # of the inputs of cases that are compiled at once
IMPLS: tuple[Impl, Impl] = ("pallas", "reference")  # in this order in `measure`
ROUTINGS = 4  # of a MoE's bank, which is larger than any cache
PEERS = ("peers_kda.py", "peers_moe.py")  # programs of their own, in this folder


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device does at best, as measured: bytes and operations a second."""

    bandwidth: float
    matrix: float

    def seconds(self, size: int, operations: int) -> float:
        return max(size / self.bandwidth, operations / self.matrix)


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table; times in seconds."""

    name: str
    bytes: int
    ceiling: float
    ours: timing.Timing
    peers: dict[str, float]

    def text(self) -> str:
        seconds = self.ours.seconds
        peers = "  ".join(
            f"{name} {peer * 1e6:.1f} us ({peer / seconds:.2f}x)"
            for name, peer in self.peers.items()
        )
        return (
            f"{self.name:40} {self.bytes / 1e6:8.2f} MB  ceiling {self.ceiling * 1e6:7.2f} us  "
            f"ours {seconds * 1e6:7.2f} us ({self.ours.kernels * 1e6:.2f} in "
            f"{self.ours.launches:.3g} launches)  {100 * self.ceiling / seconds:5.1f}%  {peers}"
        )

    def record(self) -> dict:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "ceiling_us": self.ceiling * 1e6,
            "us": self.ours.seconds * 1e6,
            "spread_us": self.ours.spread * 1e6,
            "kernels_us": self.ours.kernels * 1e6,
            "launches": self.ours.launches,
            "percent": 100 * self.ceiling / self.ours.seconds,
            "peers_us": {name: seconds * 1e6 for name, seconds in self.peers.items()},
        }


def make_sets(case: Case) -> list[tuple]:
    """Distinct arrays for each application; of a MoE, distinct rows for one bank."""
    make = jax.jit(functools.partial(inputs, case, jnp.bfloat16), static_argnums=0)
    first = make(0)
    if "moe" in case.op:
        kept = {name: first[name] for name in ("bank", "weights") if has_bank(first.get(name))}
        rows = jax.jit(
            lambda seed: {k: v for k, v in make(seed).items() if k not in kept}, static_argnums=0
        )
        sets = [{**rows(seed), **kept} for seed in range(ROUTINGS)]
    else:
        sets = [jax.tree.map(jnp.copy, first) for _ in range(timing.rotation(tree_bytes(first)))]
    if case.op not in CARRIED:
        return [(arrays,) for arrays in sets]
    carried, _ = CARRIED[case.op]
    return [(arrays.pop(carried), arrays) for arrays in sets]


def has_bank(argument: Any) -> bool:
    """Whether a MoE's argument is its bank of experts, or the weights that hold it."""
    return isinstance(argument, Mxfp4Bank) or hasattr(argument, "bank")


def applied(case: Case, impl: Impl) -> Callable[..., Any]:
    """The op as a function of a set: (arrays) -> result, or (state, arrays) -> (state, rest)."""
    op = bind(case, impl)
    if case.op not in CARRIED:
        return op
    carried, place = CARRIED[case.op]

    def step(state, arrays):
        result = list(op({**arrays, carried: state}))
        state = result.pop(place)
        return state, result

    return step


def build(job: tuple[Case, Impl, list[tuple]]) -> timing.Program | str:
    """Compile an implementation of a case over its sets and run it once, or say why not."""
    case, impl, own = job
    try:
        program = timing.compile_over(applied(case, impl), own, carry=case.op in CARRIED)
        program.run()
    except Exception as error:  # noqa: BLE001 - the other cases are measured all the same
        return reason(error)
    return program


def time_all(programs: Sequence[timing.Program | str]) -> list[timing.Timing | str]:
    """Time programs in one trace or, if that fails, in one each; text stays as it is."""
    built = [each for each in programs if not isinstance(each, str)]
    times: list[timing.Timing | str] = []
    try:
        times += timing.device_times(built)
    except RuntimeError as error:
        print(f"{len(built)} programs are timed again, one by one: {reason(error)}", flush=True)
        times += map(time_one, built)
    found = iter(times)
    return [each if isinstance(each, str) else next(found) for each in programs]


def time_one(program: timing.Program) -> timing.Timing | str:
    """Time a program in a trace of its own, or say why not."""
    try:
        return timing.device_times([program])[0]
    except RuntimeError as error:
        return reason(error)


def measure(
    cases: Sequence[Case], ceilings: Ceilings, outside: dict, progress: Progress
) -> Iterator[Line]:
    """Time cases and XLA on their references, on the same inputs; what fails is said."""
    made: dict[Case, list[tuple]] = {}
    for case in cases:
        with progress.case(str(case)):
            made[case] = make_sets(case)
    jobs = [(case, impl, own) for case, own in made.items() for impl in IMPLS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = time_all(list(pool.map(build, jobs)))
    for (case, own), ours, xla in zip(made.items(), times[::2], times[1::2], strict=True):
        peers = dict(outside.get(str(case), {}))
        if isinstance(xla, str):
            print(f"{case!s:40} XLA on the reference failed: {xla}", flush=True)
        else:
            peers = {"xla": xla.seconds, **peers}
        if isinstance(ours, str):
            progress.fail(str(case), ours)
            continue
        line = None
        with progress.case(str(case)):
            size, operations = least_work(case, own[0])
            line = Line(str(case), size, ceilings.seconds(size, operations), ours, peers)
        if line is not None:
            yield line


def least_work(case: Case, first: tuple) -> tuple[int, int]:
    """Bytes and operations that a case's first set needs at least."""
    arrays = dict(first[-1])
    if case.op in CARRIED:
        arrays[CARRIED[case.op][0]] = first[0]
    result = jax.eval_shape(bind(case, "reference"), arrays)
    return (
        rooflines.least_bytes(case, arrays, result),
        rooflines.matrix_operations(case, arrays),
    )


def outside_peers(python: str, seconds: float | None) -> dict[str, dict[str, float]]:
    """Case -> peer -> seconds, of the peers that are no JAX programs.

    The last line of each script is JSON: peer -> case -> microseconds. What it could not measure
    is not in it, and its exit status is not 0. One that takes longer than `seconds` is ended.
    """
    found: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for script in PEERS:
        command = [python, str(Path(__file__).with_name(script))]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
            times = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            print(f"{script}: out of time", flush=True)
            continue
        except (IndexError, json.JSONDecodeError):
            print(f"{script}: not measured (exit status {done.returncode})", flush=True)
            continue
        if done.returncode:
            print(f"{script}: not all measured (exit status {done.returncode})", flush=True)
        for peer, cases in times.items():
            for name, microseconds in cases.items():
                found[name][peer] = microseconds * 1e-6
    return dict(found)


def groups(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Runs of cases that fit the device together."""
    group: list[Case] = []
    size = 0
    for case in cases:
        shapes = jax.eval_shape(functools.partial(inputs, case, jnp.bfloat16))
        needed = max(2 * tree_bytes(shapes), timing.ROTATION_BYTES)
        if group and (len(group) == TOGETHER or size + needed > MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(case)
        size += needed
    if group:
        yield group


def main() -> int:
    """Measure what the command line selects; 1 if a case of ours failed or was left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--case", default="", help="cases whose name holds this text")
    parser.add_argument("--tags", nargs="*", default=["k3-tp8", "decode"])
    parser.add_argument("--peers", action="store_true", help=f"run {', '.join(PEERS)} first")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has torch")
    add_limit(parser)
    arguments = parser.parse_args()
    tags = {"gpu", *arguments.tags}
    chosen = [case for case in CASES if case.tags >= tags and arguments.case in str(case)]
    if not chosen:
        parser.error(f"no case has the tags {sorted(tags)} and {arguments.case!r} in its name")
    timing.require_gpu()
    progress = Progress(arguments.minutes)
    outside = outside_peers(arguments.python, progress.seconds_left) if arguments.peers else {}
    ceilings = Ceilings(timing.read_bandwidth(), timing.matrix_rate())
    device = jax.devices()[0].device_kind
    print(
        f"jax {jax.__version__} on {device}: reads {ceilings.bandwidth / 1e12:.2f} TB/s, "
        f"bf16 products {ceilings.matrix / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    records = []
    for group in groups(chosen):
        if progress.in_time(*map(str, group)):
            for line in measure(group, ceilings, outside, progress):
                print(line.text(), flush=True)
                records.append(line.record())
    header = {"jax": jax.__version__, "device": device, **dataclasses.asdict(ceilings)}
    print(json.dumps({**header, **progress.record(), "cases": records}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
