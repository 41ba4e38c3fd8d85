"""Injected faults in a real engine: a bit stops it, a NaN ends one request alone."""

import re

import pytest
from made import drive, made_config, made_weights, run_of

from k3jax.decode.failstop import FailStop
from k3jax.decode.faults import Fault
from k3jax.engine import Engine
from k3jax.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = {"a": [3, 200, 7], "b": [90, 5, 5, 41, 8], "c": [400]}


@pytest.fixture(scope="module", params=[1, 2])
def executor(request, golden):
    """The stock path on one and on two ranks."""
    config = made_config(golden, ("kda", "kda", "mla"), block=2, inner=64)
    run = run_of("stock", builds=((1, 3),), tp=request.param, check_every=4)
    return drive(config, made_weights(config), run).executor


def serve(executor, fault=None, names=PROMPTS):
    """Last deltas and texts by request, with a fault on the last rank."""
    if fault is not None:
        fault = Fault(executor.mesh.size - 1, *fault)
    executor.failstop = FailStop(executor.mesh, executor.decode_config.check_every, fault)
    engine = Engine(executor, executor.config, executor.decode_config)
    for name in names:
        engine.add(Request(request_id=name, prompt_ids=PROMPTS[name], params=GREEDY))
    ends, texts = {}, {name: [] for name in names}
    while engine.has_work():
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                ends[delta.request_id] = delta
    assert engine.allocator.in_use == 0
    return ends, texts


@pytest.mark.parametrize("kind", ["wait", "diverged"])
def test_a_bit_stops_the_engine(executor, kind):
    rank = executor.mesh.size - 1
    text = rf"all ranks stop at step (\d+): rank {rank} has health word 0x.* since step 6 \("
    with pytest.raises(RuntimeError, match=text) as error:
        serve(executor, (6, kind))
    at = int(re.search(r"at step (\d+)", str(error.value))[1])
    assert 6 < at <= 6 + 4 + 2
    # A restart, in short: the word is sticky.
    executor.health = executor.health - executor.health


def test_a_nan_ends_its_request_alone(executor):
    _, wanted = serve(executor)
    first = next(iter(PROMPTS))
    ends, texts = serve(executor, (8, "nonfinite"))
    assert {name: end.finish_reason for name, end in ends.items()} == {
        name: "error" if name == first else "length" for name in PROMPTS
    }
    assert "not finite" in ends[first].error
    assert texts[first] == wanted[first][: len(texts[first])]
    assert {name: texts[name] for name in ("b", "c")} == {name: wanted[name] for name in ("b", "c")}
    assert serve(executor)[1] == wanted  # the next tenant of its slot
