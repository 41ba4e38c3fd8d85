"""Host time of a decode step at Kimi-K3's full depth: `python -m benchmarks.dispatch`.

The model has all 93 layers, so a step has all its arrays and launches, but little in each. Prints
how long `Executor.run` keeps the host, and how long a step takes with one more in flight. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.config import K3Config
from k3jax.decode.batch import Step
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.decode.reasons import BatchRows
from k3jax.parallel import make_mesh, shardings
from k3jax.params import packed_shapes, packed_specs

WARM_STEPS = 10  # whose times do not count
CONFIG = Path(__file__).parent.parent / "tests" / "data" / "k3-config.json"


def thin_config(layers: int) -> K3Config:
    """Kimi-K3 with all its layers, or the first ones, and next to no width."""
    whole = K3Config.from_file(CONFIG)
    return replace(
        whole,
        hidden_size=128,
        num_layers=layers,
        mixers=whole.mixers[:layers],
        ffns=whole.ffns[:layers],
        vocab_size=512,
        dense_inner=128,
        bos_token_id=508,
        eos_token_id=509,
        pad_token_id=511,
        kda=replace(whole.kda, num_heads=2, head_dim=32),
        mla=replace(
            whole.mla,
            num_heads=2,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        moe=replace(whole.moe, num_experts=16, top_k=4, inner=32, latent=64, shared_inner=32),
    )


def make_executor(config: K3Config, options: argparse.Namespace) -> Executor:
    """An executor with weights of zero."""
    run = DecodeConfig(
        max_requests=options.requests,
        max_context=256,
        num_spec=options.rows - 1,
        decode_backend=options.decode_backend,
        builds=((options.rows, options.requests),),
        prefill_buckets=((1, 16),),
    )
    mesh = make_mesh(1)
    params = jax.tree.map(
        lambda shape, split: jax.device_put(np.zeros(shape.shape, shape.dtype), split),
        packed_shapes(config, 1),
        shardings(mesh, packed_specs(config)),
    )
    return Executor(params, config, run, mesh, progress=print)


def measure(executor: Executor, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over steps: in `run`, and from one step's landing to the next one's."""
    rows = BatchRows(decoding=(options.rows,) * options.requests)
    step = executor.plan(rows) or Step("decode", options.requests, options.rows)
    before, inside, whole = None, [], []
    last = time.perf_counter()
    for _ in range(options.steps):
        batch = executor.empty_batch(step)  # null requests: the same launches
        begin = time.perf_counter()
        output = executor.run(step, batch)
        inside.append(time.perf_counter() - begin)
        if before is not None:
            np.asarray(before.tokens)
        now = time.perf_counter()
        whole.append(now - last)
        before, last = output, now
    return {
        "specialized": step.specialized,
        "layers": executor.config.num_layers,
        "arrays": len(jax.tree.leaves((executor.params, executor.cache))),
        "run_ms": statistics.median(inside[WARM_STEPS:]) * 1e3,
        "step_ms": statistics.median(whole[WARM_STEPS:]) * 1e3,
    }


def main() -> None:
    """Measure what the command line selects."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.add_argument("--layers", type=int, default=93)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--decode-backend", default="auto")
    options = parser.parse_args()
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps must be above {WARM_STEPS}, of which the times do not count")
    found = measure(make_executor(thin_config(options.layers), options), options)
    print(
        "{layers} layers, {arrays} arrays: the host is {run_ms:.2f} ms in run, a step takes "
        "{step_ms:.2f} ms (specialized: {specialized})".format(**found)
    )
    print(json.dumps({"benchmark": "dispatch", "jax": jax.__version__, **found}))


if __name__ == "__main__":
    main()
