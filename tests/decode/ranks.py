"""One of several ranks: `python ranks.py ADDRESS RANKS RANK`; prints what it came to as JSON."""

import json
import sys
import time

import jax
from places import batch_of, buffers_of, numbers, output_of, words
from stepping import run

from k3jax.decode.agreement import agree, agree_on_minimum, refusal
from k3jax.decode.batch import Step
from k3jax.decode.failstop import FailStop
from k3jax.decode.faults import Fault
from k3jax.parallel import make_mesh

EVERY = 16


def refused(reasons, what):
    """The error that a rank raises where one of them has reasons."""
    try:
        if agreed := agree(reasons, what):
            raise refusal(what, agreed)
    except ValueError as error:
        return str(error)
    return None


def unheard(call):
    """The error of an agreement that does not come about, and the seconds it took."""
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return None


def buffered(mesh, rank):
    """What comes back from buffers that each rank makes in an order of its own, as compilers end.

    [numbers of batches, of outputs, this rank's health words]
    """
    steps = (Step("prefill", 2, 8), Step("decode", 2, 2), Step("decode", 1, 1))
    made = {step: buffers_of(step, mesh) for step in steps[rank % 3 :] + steps[: rank % 3]}
    batches = set().union(*(numbers(made[step].put(batch_of(step, 1))) for step in steps))
    outputs = [made[step].take(output_of(step, mesh, 1)) for step in steps]
    return [list(batches), list(numbers(outputs)), [words(output) for output in outputs]]


def main(address, ranks, rank):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address, ranks, rank, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20
    )
    last = rank == ranks - 1
    found = {
        "fine": refused([], "these weights"),
        "last": refused(["a", "b"] if last else [], "these weights"),
        "all": refused([f"reason of {rank}"], "this cache"),
        "minimum": agree_on_minimum(100 - rank, "the number of pages"),
    }
    # All that so far needed no device of another process: the backend did not exist.
    mesh = make_mesh(ranks)
    found["buffers"] = buffered(mesh, rank)
    found["stop"] = run(mesh, FailStop(mesh, EVERY, Fault(1, 21, "diverged")), 80)
    found["fine again"] = run(mesh, FailStop(mesh, EVERY), 20)[2]
    topic = "another thing" if last else "one thing"
    found["apart"] = unheard(lambda: agree([], topic))
    found["silent"] = None if last else unheard(lambda: agree([], "the end", seconds=1.0))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
