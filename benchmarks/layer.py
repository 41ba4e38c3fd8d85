"""Time a layer of a Kimi-K3 rank at TP 8: `python -m benchmarks.layer [--part decode prefill]`.

Four layers of real size with random weights run one after another, so that no weight comes out of
the cache. There is one rank, so the reductions between ranks are not in these times; with --tp N
there are also N of the 8 ranks, on a GPU each, with their reductions. Prints, per kind and width,
the experts that the rows chose, the bytes that these and all else weigh, their ceiling, the time of
a layer made of kernels, its percentage and launches, and the stock path's time, or what N ranks
take more than one; then the prompt tokens a second of such a slice. Ends with one JSON line. Needs
GPUs with 40 GB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import timing
from benchmarks.layer_inputs import (
    layer_specs,
    make_caches,
    make_params,
    make_plan,
    make_residual,
)
from benchmarks.progress import Progress, add_limit
from k3jax.cache import LayerCache, cache_specs
from k3jax.config import K3Config
from k3jax.decode.layers import layer_kernels
from k3jax.doctor import COMMAND_BUFFERS, gather, xla_flag
from k3jax.model.decoder import layer_body
from k3jax.model.inputs import Residual, StepPlan
from k3jax.parallel import REPLICATED, make_mesh, shardings, spmd
from k3jax.params import packed_shapes
from pallas_kernels import Impl

CONFIG = Path(__file__).parent.parent / "tests" / "data" / "k3-config.json"
RANKS, LAYERS, CONTEXT = 8, 4, 8192
WIDTHS = {1: (1, 1), 8: (1, 8), 16: (2, 8)}  # rows: (requests, rows of each)
KINDS = {"whole": ("kda",) * LAYERS, "ffn": ("mla",) * LAYERS}
SLICE = ("kda", "kda", "kda", "mla")
CHUNK = 8192
MOST_PARTS = 30  # kernels that are listed
# In the names of kernels; XLA's own reductions are named after the psum.
REDUCTION = re.compile("nccl|all.?reduce|psum", re.IGNORECASE)


def rank_config(mixers: tuple[Any, ...], ranks: int = 1) -> K3Config:
    """The part of Kimi-K3 that so many of its ranks hold, as a model of its own."""
    whole = K3Config.from_file(CONFIG)
    moe, kda, mla = whole.moe, whole.kda, whole.mla

    def part(size: int) -> int:
        return size // RANKS * ranks

    return replace(
        whole,
        num_layers=len(mixers),
        mixers=mixers,
        ffns=tuple("moe" for _ in mixers),
        kda=replace(kda, num_heads=part(kda.num_heads)),
        mla=replace(mla, num_heads=part(mla.num_heads)),
        moe=replace(moe, inner=part(moe.inner), shared_inner=part(moe.shared_inner)),
    )


def run_layers(config: K3Config, impl: Impl, mesh: Mesh, *, tracing: bool = False) -> Any:
    """(caches, params, residual, plan) -> (caches, result) through all layers of the config.

    With `tracing`, which is not what a step runs, the last result is the experts that each layer
    chose, i32[W, J] each; else nothing.
    """
    kernels = layer_kernels(config, mesh.size, impl)

    def run(
        caches: list[LayerCache], params: list[Any], residual: Residual, plan: StepPlan
    ) -> tuple[list[LayerCache], tuple[Residual, jax.Array, jax.Array, list[jax.Array]]]:
        flags, health = jnp.zeros(plan.slots.shape, bool), jnp.uint32(0)
        done, chosen = [], []
        for index, cache in enumerate(caches):
            residual, cache, *words, taps = layer_body(
                params[index],
                residual,
                cache,
                plan,
                graph=kernels.by_layer[index].graph,
                starts_block=False,
                tracing=tracing,
                ranks=mesh.size,
            )
            done.append(cache)
            if tracing:
                chosen.append(taps["router_experts"])
            flags, health = flags | words[0], health | words[1]
        return done, (residual, flags, health, chosen)

    caches = list(cache_specs(config).layers)
    inputs = (caches, layer_specs(config), REPLICATED, REPLICATED)
    return spmd(run, mesh, inputs, (caches, REPLICATED))


def layer_bytes(config: K3Config, requests: int, context: int, experts: Sequence[int]) -> int:
    """The fewest bytes that one layer must move on one rank, by mean over the rank's layers.

    `experts` is how many distinct ones the rows of each layer chose.
    """
    kda, total = config.kda, 0.0
    for index, layer in packed_shapes(config, 1)["layers"].items():
        bank = {name: layer["ffn"].pop(name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
        total += timing.tree_bytes(layer)
        total += timing.tree_bytes(bank) * experts[index] / config.moe.num_experts
        if config.mixers[index] == "kda":  # the state read and written
            total += requests * 2 * kda.num_heads * kda.head_dim**2 * 4
        else:
            latent = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
            total += requests * context * latent * 2
    return round(total / config.num_layers)


@dataclass(frozen=True)
class Case:
    """What is timed: a stack of layers, on rows of some requests."""

    name: str
    config: K3Config
    impl: Impl
    kind: str
    requests: int
    rows: int
    starts: int
    ranks: int = 1

    @property
    def title(self) -> str:
        return f"{self.name} at TP {self.ranks} by {self.impl}"

    def arrays(self) -> tuple[list[LayerCache], Residual, StepPlan]:
        """What the layers take beside their weights; to be jitted."""
        context = self.starts + self.rows
        return (
            make_caches(self.config, self.requests, self.rows, context),
            make_residual(self.config, self.requests * self.rows),
            make_plan(self.kind, self.requests, self.rows, self.starts, context),
        )

    def compile(self, params: list[Any], *, tracing: bool = False) -> timing.Program:
        mesh = make_mesh(self.ranks)
        split = (list(cache_specs(self.config).layers), REPLICATED, REPLICATED)
        build = jax.jit(self.arrays, out_shardings=shardings(mesh, split))
        caches, residual, plan = build()
        sets = [(caches, params, residual, plan)]
        run = run_layers(self.config, self.impl, mesh, tracing=tracing)
        return timing.compile_over(run, sets, carry=True)

    def count_experts(self, params: list[Any]) -> list[int]:
        """How many distinct experts each layer's rows choose; of a decode step only."""
        if self.kind != "decode":
            return []
        *_, chosen = self.compile(params, tracing=True).run()[0]
        return [len(np.unique(np.asarray(layer))) for layer in chosen]


class Measured(NamedTuple):
    """A case, what it took, and how many distinct experts each layer's rows chose."""

    case: Case
    time: timing.Timing
    experts: list[int]


def measure(cases: list[Case], progress: Progress) -> Iterator[Measured]:
    """Time the cases of one kind of layers, all of one number of ranks before the next."""
    for _, group in itertools.groupby(cases, key=lambda case: case.ranks):
        yield from measure_stack(list(group), progress)


def measure_stack(cases: list[Case], progress: Progress) -> Iterator[Measured]:
    """Compile cases of one stack abreast, then time one after another; what fails is said."""
    params = make_params(cases[0].config, make_mesh(cases[0].ranks), 1000)

    def build(case: Case) -> tuple[timing.Program, list[int]] | None:
        with progress.case(case.title):
            return case.compile(params), case.count_experts(params)
        return None

    with ThreadPoolExecutor(8) as pool:
        built = list(zip(cases, pool.map(build, cases), strict=True))
    for case, made in built:
        measured = None
        if made is not None:
            program, experts = made
            with progress.case(case.title):
                measured = Measured(case, timing.device_times([program])[0], experts)
        if measured is not None:
            yield measured


def decode_cases(kind: str, impls: list[Impl], widths: list[int], tp: int) -> list[Case]:
    """Every width of a kind by every implementation, stock first and on one rank only."""
    return [
        Case(
            f"{kind} {width:2} rows ({WIDTHS[width][0]} x {WIDTHS[width][1]})",
            rank_config(KINDS[kind], ranks),
            impl,
            "decode",
            *WIDTHS[width],
            CONTEXT - WIDTHS[width][1],
            ranks,
        )
        for ranks in sorted({1, tp})
        for width in widths
        for impl in sorted(impls, key=lambda impl: impl != "reference")
        if impl != "reference" or ranks == 1
    ]


def decode_record(measured: Measured, bandwidth: float) -> dict[str, Any]:
    """What a case took, for the line of JSON."""
    case, time, experts = measured
    one = rank_config(case.config.mixers)
    size = layer_bytes(one, case.requests, case.starts + case.rows, experts)
    each = time.seconds / LAYERS
    reductions = sum(part for name, part in time.parts.items() if REDUCTION.search(name))
    return {
        "name": case.name,
        "tp": case.ranks,
        "experts": experts,
        "mean_experts": sum(experts) / LAYERS,
        "megabytes": size / 1e6,
        "ceiling_us": size / bandwidth * 1e6,
        "us": each * 1e6,
        "us_by_device": [seconds / LAYERS * 1e6 for seconds in time.by_device],
        "spread_us": time.spread / LAYERS * 1e6,
        "percent": 100 * size / bandwidth / each,
        "launches": time.launches / LAYERS,
        "kernels_us": time.kernels / LAYERS * 1e6,
        "reductions_us": reductions / LAYERS * 1e6,
    }


def report_decode(
    cases: list[Case], bandwidth: float, parts: bool, progress: Progress
) -> Iterator[dict]:
    """A line for each width; with `parts`, what each kernel takes of it."""
    beside: dict[tuple[str, str], float] = {}  # of one rank, by name and implementation
    for measured in measure(cases, progress):
        case, time = measured.case, measured.time
        record = decode_record(measured, bandwidth)
        if case.ranks == 1:
            beside[case.name, case.impl] = record["us"]
        if case.impl == "reference":
            continue
        record["stock_us"] = beside.get((case.name, "reference"))
        record["tp1_us"] = beside.get((case.name, case.impl))
        print(
            "{name:22} TP {tp}  {mean_experts:5.1f} experts {megabytes:6.1f} MB  "
            "ceiling {ceiling_us:6.1f} us  layer {us:6.1f} us {percent:5.1f}%  "
            "{launches:.1f} launches of {kernels_us:.1f} us  ".format(**record)
            + (beside_stock(record) if case.ranks == 1 else beside_one(record)),
            flush=True,
        )
        if parts:
            print_parts(time)
        yield record


def print_parts(time: timing.Timing) -> None:
    """What each kernel takes of a layer, the largest first."""
    for name, seconds in sorted(time.parts.items(), key=lambda part: -part[1])[:MOST_PARTS]:
        print(f"    {seconds / LAYERS * 1e6:8.2f} us  {name[:70]}", flush=True)


def beside_stock(record: dict[str, Any]) -> str:
    """What the stock path takes."""
    stock = record["stock_us"]
    return "stock not measured" if stock is None else f"stock {stock:.1f} us"


def beside_one(record: dict[str, Any]) -> str:
    """What several ranks take more than one, and what of it the reductions are."""
    one, quickest = record["tp1_us"], min(record["us_by_device"])
    more = "TP 1 not measured" if one is None else f"{record['us'] - one:+.1f} us over TP 1"
    reductions = f"reductions {record['reductions_us']:.1f} us with what they wait"
    return f"{more}  {reductions}  quickest device {quickest:.1f} us"


def report_prefill(
    contexts: list[int], impl: Impl, tp: int, parts: bool, progress: Progress
) -> Iterator[dict]:
    """Prompt tokens a second of three KDA layers and an MLA layer, in the chunk at each context."""
    rows = ("prefill", 1, CHUNK)
    cases = [
        Case(f"prefill at {end}", rank_config(SLICE, ranks), impl, *rows, end - CHUNK, ranks)
        for ranks in sorted({1, tp})
        for end in contexts
    ]
    for case, time, _ in measure(cases, progress):
        rate = CHUNK / time.seconds
        took = f"{time.seconds * 1e3:.2f} ms  {rate:.0f} tokens/s of {LAYERS} layers"
        print(f"{case.name:38} TP {case.ranks}  {took}", flush=True)
        if parts:
            print_parts(time)
        spread = {"ms": time.seconds * 1e3, "spread_ms": time.spread * 1e3}
        yield {"name": case.name, "tp": case.ranks, **spread, "tokens_per_second": rate}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked before anything is made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__)
    parts = ["decode", "prefill"]
    parser.add_argument("--part", nargs="+", default=parts, choices=parts)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--no-stock", action="store_true", help="without the stock path beside it")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 65536])
    parser.add_argument("--kernels", action="store_true", help="also what each kernel takes")
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2, 4, 8), help="ranks, a GPU each")
    add_limit(parser)
    options = parser.parse_args(arguments)
    if min(options.contexts) < CHUNK:
        parser.error(f"--contexts must hold a chunk of {CHUNK} tokens, got {options.contexts}")
    return options


def main() -> int:
    """Measure what the command line selects; 1 if a case failed or was left out."""
    options = parse()
    timing.require_gpu()
    make_mesh(options.tp)  # raises if there are too few
    progress = Progress(options.minutes)
    device, buffers = jax.devices()[0].device_kind, xla_flag(gather(), COMMAND_BUFFERS)
    bandwidth = timing.read_bandwidth()
    print(f"jax {jax.__version__} on {device}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    print(f"command buffers of {'the default kinds' if buffers is None else buffers}", flush=True)
    impls: list[Impl] = ["pallas"] if options.no_stock else ["reference", "pallas"]
    records: list[dict] = []
    for kind in options.kinds if "decode" in options.part else ():
        if progress.in_time(kind):
            cases = decode_cases(kind, impls, options.widths, options.tp)
            records += report_decode(cases, bandwidth, options.kernels, progress)
    if "prefill" in options.part and progress.in_time("prefill"):
        records += report_prefill(options.contexts, "pallas", options.tp, options.kernels, progress)
    header = {"benchmark": "layer", "jax": jax.__version__, "command_buffers": buffers}
    header |= progress.record()
    print(json.dumps({**header, "cases": records}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
