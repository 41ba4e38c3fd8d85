"""Time the kernels beside their peers: `python -m benchmarks.kernels [--case REGEX] [--tags ..]`.

Prints, per case, the least bytes (or operations) and the time they take at the ceilings measured
in the same run, our time and its percentage, each peer's time and ratio, and our kernels; ends with
one JSON line. Cases are timed as layers of a step: one plan, their flags and health words ORed. The
peers are XLA on the reference, and with --peers what PEERS find installed. Rows come a dozen at a
time: cases compile together, and nothing else runs while they are timed. Needs a GPU.
Results with date and versions belong in RESULTS.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
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
# Arguments that all layers of a step share, so that what is made of them alone is made once.
PLAN = ("slots", "starts", "accepted", "fresh", "lengths", "page_table")
TOGETHER = 12  # cases compiled at once, in threads, and timed in one trace
MOST_BYTES = 40 << 30  # of the inputs of cases that are compiled at once
IMPLS: tuple[Impl, ...] = ("pallas", "reference")  # in this order in `measure`
WORDS_TOGETHER = 8  # layers
ROUTINGS = 4  # of a MoE's bank, which is larger than any cache
PEERS = ("peers_kda.py", "peers_moe.py")  # programs of their own, in this folder
PEER_LINES = 12  # of a peer's output, shown where it fails


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
            f"  of {self.parts()}"
        )

    def parts(self) -> str:
        """The kernels by their share of the time."""
        parts = sorted(self.ours.parts.items(), key=lambda part: -part[1])
        return " + ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in parts)

    def record(self) -> dict:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "ceiling_us": self.ceiling * 1e6,
            "us": self.ours.seconds * 1e6,
            "spread_us": self.ours.spread * 1e6,
            "kernels_us": self.ours.kernels * 1e6,
            "launches": self.ours.launches,
            "parts_us": {name: seconds * 1e6 for name, seconds in self.ours.parts.items()},
            "percent": 100 * self.ceiling / self.ours.seconds,
            "peers_us": {name: seconds * 1e6 for name, seconds in self.peers.items()},
        }


@dataclasses.dataclass(frozen=True)
class Made:
    """The arguments of a case: (arrays,) or (state, arrays) of each application, and the plan."""

    sets: list[tuple]
    plan: dict[str, Any]


def make_sets(case: Case) -> Made:
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
    plan = {name: first[name] for name in PLAN if name in first}
    sets = [{k: v for k, v in arrays.items() if k not in plan} for arrays in sets]
    if case.op not in CARRIED:
        return Made([(arrays,) for arrays in sets], plan)
    carried, _ = CARRIED[case.op]
    return Made([(arrays.pop(carried), arrays) for arrays in sets], plan)


def has_bank(argument: Any) -> bool:
    """Whether a MoE's argument is its bank of experts, or the weights that hold it."""
    return isinstance(argument, Mxfp4Bank) or hasattr(argument, "bank")


def applied(case: Case, impl: Impl) -> Callable[..., Any]:
    """(arrays, plan) -> result, or (state, arrays, plan) -> (state, rest)."""
    op = bind(case, impl)
    if case.op not in CARRIED:
        return lambda arrays, plan: op({**arrays, **plan})
    carried, place = CARRIED[case.op]

    def step(state, arrays, plan):
        result = list(op({**arrays, **plan, carried: state}))
        state = result.pop(place)
        return state, result

    return step


def or_words(results: list[Any]) -> list[tuple[list[jax.Array], list[jax.Array]]]:
    """What the layers of a step gave, with their flags and health words ORed, as the model does.

    A few layers at a time: over the words of a hundred XLA compiles for more than a minute.
    """
    merged = []
    for first in range(0, len(results), WORDS_TOGETHER):
        layers = [jax.tree.leaves(result) for result in results[first : first + WORDS_TOGETHER]]
        words = zip(*([leaf for leaf in each if is_word(leaf)] for each in layers), strict=True)
        rest = [leaf for each in layers for leaf in each if not is_word(leaf)]
        merged.append((rest, [functools.reduce(operator.or_, each) for each in words]))
    return merged


def is_word(leaf: jax.Array) -> bool:
    """Whether a result is bool[B] flags of requests or a health word u32[]."""
    return leaf.dtype == jnp.bool_ or (leaf.dtype == jnp.uint32 and leaf.ndim == 0)


def build(job: tuple[Case, Impl, Made]) -> timing.Program | str:
    """Compile an implementation of a case over its sets and run it once, or say why not."""
    case, impl, own = job
    try:
        program = timing.compile_over(
            applied(case, impl),
            own.sets,
            carry=case.op in CARRIED,
            common=(own.plan,),
            merge=or_words,
        )
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
    cases: Sequence[Case],
    impls: Sequence[Impl],
    ceilings: Ceilings,
    outside: dict,
    progress: Progress,
) -> Iterator[Line]:
    """Time cases and XLA on their references, on the same inputs; what fails is said."""
    made: dict[Case, Made] = {}
    for case in cases:
        with progress.case(str(case)):
            made[case] = make_sets(case)
    jobs = [(case, impl, own) for case, own in made.items() for impl in impls]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = time_all(list(pool.map(build, jobs)))
    for place, (case, own) in enumerate(made.items()):
        ours, *others = times[place * len(impls) : (place + 1) * len(impls)]
        peers = {name: 1e-6 * each for name, each in outside.get(str(case), {}).items()}
        for xla in others:
            if isinstance(xla, str):
                print(f"{case!s:40} XLA on the reference failed: {xla}", flush=True)
            else:
                peers = {"xla": xla.seconds, **peers}
        if isinstance(ours, str):
            progress.fail(str(case), ours)
            continue
        line = None
        with progress.case(str(case)):
            size, operations = least_work(case, own)
            line = Line(str(case), size, ceilings.seconds(size, operations), ours, peers)
        if line is not None:
            yield line


def least_work(case: Case, own: Made) -> tuple[int, int]:
    """Bytes and operations that a case's first set needs at least."""
    first = own.sets[0]
    arrays = {**first[-1], **own.plan}
    if case.op in CARRIED:
        arrays[CARRIED[case.op][0]] = first[0]
    result = jax.eval_shape(bind(case, "reference"), arrays)
    return (
        rooflines.least_bytes(case, arrays, result),
        rooflines.matrix_operations(case, arrays),
    )


def outside_peers(python: str, progress: Progress) -> dict[str, dict[str, float]]:
    """Case -> peer -> microseconds, of the peers that are no JAX programs.

    The last line of each script is JSON: peer -> case -> microseconds. What it could not measure
    is not in it, and its exit status is not 0: the end of what it said is shown. One that takes
    longer than there is time is ended.
    """
    found: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for script in PEERS:
        status, said = run_peer([python, str(Path(__file__).with_name(script))], progress)
        if status != 0:
            print(f"{script}: not all measured ({status=}); it said at last", flush=True)
            print(*(f"    {line}" for line in said[-PEER_LINES:]), sep="\n", flush=True)
        for peer, cases in times_of(said).items():
            for name, microseconds in cases.items():
                found[name][peer] = microseconds
    return dict(found)


def run_peer(command: list[str], progress: Progress) -> tuple[int | None, list[str]]:
    """The exit status of a command, None if it was ended for want of time, and all its lines."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=progress.seconds_left)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        log.seek(0)
        return status, log.read().splitlines()


def times_of(said: Sequence[str]) -> dict[str, dict[str, float]]:
    """The last line of JSON that a peer said; warnings may follow it."""
    for line in reversed(said):
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                return json.loads(line)
    return {}


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
    parser.add_argument("--case", default="", help="cases in whose name this pattern is found")
    parser.add_argument("--tags", nargs="*", default=["k3-tp8", "decode"])
    parser.add_argument("--peers", action="store_true", help=f"run {', '.join(PEERS)} first")
    parser.add_argument("--no-xla", action="store_true", help="without XLA on the reference")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has torch")
    add_limit(parser)
    arguments = parser.parse_args()
    tags = {"gpu", *arguments.tags}
    chosen = [case for case in CASES if case.tags >= tags and re.search(arguments.case, str(case))]
    if not chosen:
        parser.error(f"no case has the tags {sorted(tags)} and {arguments.case!r} in its name")
    timing.require_gpu()
    impls = IMPLS[:1] if arguments.no_xla else IMPLS
    progress = Progress(arguments.minutes)
    outside = outside_peers(arguments.python, progress) if arguments.peers else {}
    if outside:  # at once: what ends this program early does not cost them
        print(json.dumps({"peers_us": outside}), flush=True)
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
            for line in measure(group, impls, ceilings, outside, progress):
                print(line.text(), flush=True)
                records.append(line.record())
    header = {"jax": jax.__version__, "device": device, **dataclasses.asdict(ceilings)}
    print(json.dumps({**header, **progress.record(), "peers_us": outside, "cases": records}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
