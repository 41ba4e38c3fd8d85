"""A process of benchmarks/ranks.py: `python parts.py PART TP STEPS ADDRESS RANK`.

Its last line is what it found, as JSON; where that does not hold it fails. Kernels run as layer
kernels where they compile.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import jax
from made import WHOLE_HEAVY, both_texts, drive, made_config, made_weights, run_of
from traffic import Traffic, engine_on, scarce, soak

from k3jax.decode.watchdog import Watchdog
from k3jax.serve.link import WorkerSettings
from k3jax.serve.ranks import GRACE_SECONDS, Leader, follow, join

GOLDEN = Path(__file__).parents[1] / "golden"
FAULT_STEP = 20


def on_gpu():
    return jax.default_backend() == "gpu"


def executor_of(tp, **fields):
    """Few pages; where kernels compile nothing else may run decode steps."""
    return scarce(GOLDEN, tp, "specialized" if on_gpu() else "auto", **fields)


def compare_texts(tp, steps):
    """Layer kernels on all ranks, the stock path on one; few texts where they are interpreted."""
    mixers = WHOLE_HEAVY if on_gpu() else ("kda", "kda", "mla")
    config = made_config(GOLDEN, mixers, block=2, heads=4 * tp, inner=32 * tp)
    weights, impl = made_weights(config, seed=1), None if on_gpu() else "interpret"
    stock = run_of("stock", builds=((1, 4),))
    special = run_of("specialized", builds=((1, 4), (3, 4)), tp=tp, impl=impl)
    drivers = [drive(config, weights, run, progress=print) for run in (stock, special)]
    cases, few = [], {} if on_gpu() else {"seeds": 1, "tokens": 9}
    for case, found, wanted in both_texts(*drivers, (1, 3), **few):
        assert found == wanted, f"{case}: TP {tp} gives {found}, TP 1 {wanted}"
        cases.append(case)
    return {"layers": config.num_layers, "texts": cases, "tokens": len(wanted)}


def soak_all(tp, steps):
    """One engine on all devices."""
    executor = executor_of(tp)
    wrong, stats = soak(engine_on(executor, executor), steps)
    assert not wrong, "; ".join(wrong)
    return {"finished": stats.finished, "preemptions": stats.preemptions, "steps": stats.steps}


def be_a_rank(address, tp, rank, fault):
    """One of several processes; the first has an engine, and traffic that never ends."""
    place = {"coordinator": address, "num_processes": tp, "process_id": rank}
    join(WorkerSettings(address="", parent=0, model="", **place))
    executor = executor_of(tp, inject_fault=fault)
    landing = Watchdog(executor.decode_config.step_timeout).landing
    if rank:
        follow(executor, landing)
        return
    engine = engine_on(Leader(executor, address), executor, landing=landing)
    traffic = Traffic(engine)
    while True:
        traffic.step()
        if executor.failstop.steps == FAULT_STEP // 2:
            print("steps are run", flush=True)


def main(part, tp, steps, address, rank):
    """Ends by itself on an error: in an orderly end jax.distributed would wait for the others."""
    try:
        if part in ("fault", "kill"):
            fault = f"{tp - 1}:{FAULT_STEP}:wait" if part == "fault" else None
            found = be_a_rank(address, tp, rank, fault)
        else:
            found = {"text": compare_texts, "soak": soak_all}[part](tp, steps)
        print(json.dumps(found), flush=True)
    except BaseException:  # noqa: BLE001 - every end is told
        traceback.print_exc()
        if rank == 0:
            time.sleep(GRACE_SECONDS)  # the others would end with it before they told theirs
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
