"""Time the kernels beside XLA on the reference: `python -m benchmarks.kernels [--case TEXT]`.

Prints, per case, bytes, ceiling, our time and its percentage, the peer's time and the ratio, and
ends with one JSON line. Needs a GPU. Results with date and versions belong in RESULTS.md.
"""

from __future__ import annotations

import argparse
import functools
import json

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import CASES, Case
from pallas_kernels.mxfp4 import GROUP

OPS = ("linear", "attn_res", "route", "moe_mxfp4")
PEERS = {"xla": "reference"}  # peer -> impl


def least_bytes(case: Case, arrays: dict, result: object) -> int:
    """The fewest bytes a case must move: what it reads, once, and what it writes."""
    if case.op == "moe_mxfp4":
        expert = 3 * case.dims["I"] * case.dims["Z"]
        rows = {name: arrays[name] for name in ("z", "experts", "weights")}
        chosen = len(jnp.unique(arrays["experts"]))
        weights = chosen * (expert // 2 + expert // GROUP)
        return weights + timing.tree_bytes((rows, result))
    if case.op == "attn_res":
        unread = case.dims["M"] - case.dims["count"]
        blocks = timing.tree_bytes(arrays["blocks"]) * unread // case.dims["M"]
        return timing.tree_bytes((arrays, result)) - blocks
    return timing.tree_bytes((arrays, result))


def make_sets(case: Case) -> list[tuple[dict]]:
    """Rotating inputs; the MoE's bank is one, larger than any cache, and the choices rotate."""
    make = jax.jit(functools.partial(inputs, case, jnp.bfloat16), static_argnums=0)
    if case.op != "moe_mxfp4":
        return timing.make_sets(lambda seed: (make(seed),))
    first = make(0)
    rows = jax.jit(
        lambda seed: {k: v for k, v in make(seed).items() if k != "bank"}, static_argnums=0
    )
    return [({**rows(seed), "bank": first["bank"]},) for seed in range(4)]


def measure(case: Case) -> timing.Line:
    """Time one case and its peers on the same inputs."""
    sets = make_sets(case)
    ours = bind(case, "pallas")
    size = least_bytes(case, sets[0][0], jax.eval_shape(ours, sets[0][0]))
    peers = {
        name: timing.device_time(bind(case, impl), sets).seconds for name, impl in PEERS.items()
    }
    peers["floor"] = timing.dispatch_floor(sets)
    return timing.Line(str(case), size, timing.device_time(ours, sets).seconds, peers)


def main() -> None:
    """Measure what the command line selects."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--case", default="", help="cases whose name holds this text")
    parser.add_argument("--tags", nargs="*", default=["k3-tp8", "decode"])
    arguments = parser.parse_args()
    bandwidth = timing.read_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    records = []
    for case in CASES:
        chosen = case.op in OPS and {"gpu", *arguments.tags} <= case.tags
        if chosen and arguments.case in str(case):
            line = measure(case)
            print(line.text(bandwidth), flush=True)
            records.append(line.record(bandwidth))
    print(json.dumps({"jax": jax.__version__, "device": device, "cases": records}))


if __name__ == "__main__":
    main()
