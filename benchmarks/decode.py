"""Tokens per second in process and what the engine adds: `python -m benchmarks.decode`.

For each concurrency the engine serves that many greedy requests while its calls to the executor are
recorded. The same calls are then replayed on the same executables without an engine; what the
engine's run takes longer is its overhead. Medians of --repeats, every prompt computed whole; the
last line is JSON. With --rank-layers the model is that many layers of real size of a Kimi-K3 rank
at TP 8, with random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.layer import SLICE, rank_config
from benchmarks.layer_inputs import make_model
from benchmarks.progress import Progress, add_limit
from k3jax.cache import SlotInit
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.batch import Batch, Step, StepOutput
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.request import Request, SamplingParams
from k3jax.sizes import bytes_at_rest, conv_window_bytes, kda_state_bytes, latent_bytes
from k3jax.speculative_model import make_drafter


class Recorder:
    """An executor that also keeps every call it got."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.sizes = executor.sizes
        self.plan, self.reason = executor.plan, executor.reason
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

        # Without a prefix cache nothing calls these.
        self.save, self.resume = executor.save, executor.resume

    def admit(self, slot: int, init: SlotInit) -> None:
        self.calls.append((self.executor.admit, (slot, init)))
        self.executor.admit(slot, init)

    def run(self, step: Step, batch: Batch) -> StepOutput:
        self.calls.append((self.executor.run, (step, batch)))
        return self.executor.run(step, batch)


def serve(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds that the engine takes for all of the prompts; RuntimeError if one is not answered."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_ids=prompt, params=params))
    ended = []
    while engine.has_work():
        ended += [delta for delta in engine.step() if delta.finish_reason]
    seconds = time.perf_counter() - start
    for delta in ended:
        if delta.completion_tokens != tokens:
            said = f"{delta.finish_reason} after {delta.completion_tokens} of {tokens} tokens"
            raise RuntimeError(f"a request ended with {said}: {delta.error}")
    return seconds


def replay(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> float:
    """Seconds that the recorded calls take; as in the engine, one step may be in flight."""
    start = time.perf_counter()
    before = None
    for call, arguments in calls:
        output = call(*arguments)
        if output is None:
            continue
        if before is not None:
            jax.block_until_ready(before.tokens)
        before = output
    jax.block_until_ready(before)
    return time.perf_counter() - start


def measure(
    engine: Engine, recorder: Recorder, concurrency: int, options: argparse.Namespace
) -> dict[str, float]:
    """Medians over repeats; the runs and the replays take turns."""
    source = random.Random(concurrency)
    vocabulary = engine.config.vocab_size
    prompts = [
        [source.randrange(vocabulary) for _ in range(options.prompt_tokens)]
        for _ in range(concurrency)
    ]
    serve(engine, prompts, options.tokens)
    walls, replays = [], []
    for _ in range(options.repeats):
        recorder.calls.clear()
        walls.append(serve(engine, prompts, options.tokens))
        replays.append(replay(recorder.calls))
    wall, alone = statistics.median(walls), statistics.median(replays)
    steps = sum(
        len(arguments) == 2 and isinstance(arguments[0], Step) for _, arguments in recorder.calls
    )
    read = step_bytes(engine.config, concurrency, options.prompt_tokens + options.tokens // 2)
    return {
        "concurrency": concurrency,
        "tokens_per_second": concurrency * options.tokens / wall,
        "tokens_per_step": concurrency * options.tokens / steps,
        "step_ms": wall / steps * 1e3,
        "overhead_ms": (wall - alone) / steps * 1e3,
        "overhead_percent": (wall - alone) / wall * 100,
        "step_megabytes": read / 1e6,
        "gigabytes_per_second": read * steps / wall / 1e9,
    }


def step_bytes(config: K3Config, requests: int, context: int) -> float:
    """Bytes that a decode step must move.

    Weights once, of the experts those that random choices would meet; states read and written;
    latents read.
    """
    experts = bytes_at_rest(config, experts_only=True)
    missed = (1 - config.moe.top_k / config.moe.num_experts) ** requests
    embedding = 2 * config.vocab_size * config.hidden_size
    weights = bytes_at_rest(config) - embedding - experts * missed
    states = 2 * (kda_state_bytes(config) + conv_window_bytes(config))
    return weights + requests * (states + latent_bytes(config, context))


def read_config(options: argparse.Namespace) -> K3Config:
    """The model's, or that of some layers of a rank: three with KDA, one with MLA, and again."""
    if not options.rank_layers:
        return K3Config.from_file(options.model)
    return rank_config(tuple(itertools.islice(itertools.cycle(SLICE), options.rank_layers)))


def main() -> int:
    """Measure, print a table, then one line of JSON; 1 if a concurrency was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--rank-layers", type=int, default=0, help="of Kimi-K3, instead of --model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-spec", type=int, default=0)
    parser.add_argument("--drafter", default="none", help="none, ngram, or a draft model")
    add_limit(parser)
    options = parser.parse_args()
    progress = Progress(options.minutes)
    config = read_config(options)
    run = DecodeConfig(
        dtype=options.dtype,
        max_requests=max(options.concurrency),
        max_context=options.prompt_tokens + options.tokens,
        prefix_cache=0,  # or later runs would not compute their prompts
        num_spec=options.num_spec,
        drafter=options.drafter,
        builds=tuple((1 + options.num_spec, count) for count in options.concurrency),
        prefill_buckets=((1, options.prompt_tokens), (4, options.prompt_tokens)),
    )
    mesh = make_mesh(run.tp)
    if options.rank_layers:
        params = make_model(config, mesh, seed=1000)
    else:
        params = load_params(options.model, config, mesh)
    executor = Executor(params, config, run, mesh, drafter=make_drafter(run, config, mesh))
    recorder = Recorder(executor)
    engine = Engine(recorder, config, run)
    print(f"{jax.devices()[0].device_kind}; {options.prompt_tokens} + {options.tokens} tokens each")
    columns = (
        "requests",
        "tokens/s",
        "tokens/step",
        "ms/step",
        "engine ms",
        "engine %",
        "MB/step",
        "GB/s",
    )
    print(" ".join(f"{name:>11}" for name in columns), flush=True)
    results = []
    for concurrency in options.concurrency:
        name = f"{concurrency} requests"
        if not progress.in_time(name):
            continue
        with progress.case(name):
            found = measure(engine, recorder, concurrency, options)
            results.append(found)
            print(" ".join(f"{value:11.2f}" for value in found.values()), flush=True)
    names = ("prompt_tokens", "tokens", "num_spec", "drafter")
    settings = {name: getattr(options, name) for name in names}
    record = {**settings, **progress.record(), "results": results}
    print(json.dumps({"benchmark": "decode", **record}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
