"""Prefix caching on small real models in float32: the texts of an engine that has no cache.

With and without speculation, split over two ranks, alone, in company, and where pages are few; with
layer kernels in test_paths.py.
"""

import pytest
from conversing import Conversations, check_conversations, engine_of
from made import drive, made_config, made_weights, run_of

from k3jax.decode.failstop import FailStop
from k3jax.decode.faults import Fault
from k3jax.parallel import make_mesh
from k3jax.params import pack_params
from k3jax.request import Request, SamplingParams
from k3jax.speculative import NgramDrafter
from k3jax.speculative_model import ModelDrafter, replicate
from pallas_kernels import BIT_PLAN

RUNS = {
    "plain": {"builds": ((1, 3),)},
    "model": {"builds": ((3, 3),), "drafter": "model"},
    "two ranks": {"builds": ((4, 3),), "drafter": "ngram", "tp": 2},
}


@pytest.fixture(scope="module")
def model(golden):
    config = made_config(golden, ("kda", "kda", "mla"), block=2, inner=64)
    return config, made_weights(config)


@pytest.fixture(scope="module")
def executors(model):
    """Executors by name, made when first asked for."""
    config, weights = model
    made = {}

    def executor(name):
        if name not in made:
            fields = {"prefix_cache": None, "page_size": 8, "prefill_buckets": ((2, 16),)}
            run = run_of("stock", **RUNS[name], **fields)
            drafter = NgramDrafter() if run.drafter == "ngram" else None
            if name == "model":
                mesh = make_mesh(1)
                params = replicate(pack_params(weights, config, mesh), mesh)
                drafter = ModelDrafter(params, config, "float32", "reference")
            made[name] = drive(config, weights, run, drafter=drafter).executor
        return made[name]

    return executor


@pytest.fixture(scope="module")
def wanted(executors):
    return Conversations(engine_of(executors("plain"), caching=False), 1).run()


@pytest.mark.parametrize("name", RUNS)
def test_conversations_say_what_they_say_without_a_cache(executors, wanted, name):
    check_conversations(executors(name), wanted)


@pytest.mark.parametrize("name", ["plain", "model"])
def test_where_pages_are_few(executors, wanted, name):
    """What is kept goes, requests are preempted, and go on from what they left themselves."""
    talk = Conversations(engine_of(executors(name), pages=1 + 17), 1)
    assert talk.run() == wanted
    stats = talk.engine.stats()
    assert stats.prefix_evictions > 0
    assert stats.preemptions > 0 or name == "model"  # it says more in a step
    assert talk.engine.allocator.free + talk.engine.allocator.idle == 17


def stream(engine, prompt, **params):
    """(tokens of each step, cached tokens) of a request that is alone, and lands wholly."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, **params)
    deltas = list(engine.stream(prompt, params))
    while engine.has_work():
        engine.step()
    return [delta.token_ids for delta in deltas], deltas[-1]


def test_a_draft_model_goes_on_as_well(executors):
    """It drafts for itself, so each draft is right, behind a restored prefix too."""
    engine, prompt = engine_of(executors("model")), list(range(40, 61))
    first, _ = stream(engine, prompt)
    longer = [*prompt, *(token for tokens in first for token in tokens), 3]
    steps, last = stream(engine, longer)
    assert last.cached_tokens > len(prompt)
    assert [len(tokens) for tokens in steps] == [1, 1, 3, 3, 3, 1]


def test_a_failed_request_leaves_no_prefix(executors):
    """A NaN in its slot: not what it left before, nor what it leaves with its last step."""
    executor = executors("plain")
    healthy, prompt = executor.failstop, list(range(100, 120))
    wanted, _ = stream(engine_of(executor), prompt)
    for step in range(1, 6):
        executor.failstop = FailStop(executor.mesh, 16, Fault(0, step, "nonfinite"))
        engine = engine_of(executor)
        _, last = stream(engine, prompt)
        failed = last.finish_reason == "error"
        assert failed == (step > 1)  # a request that only starts does not read its slot
        assert (len(engine.prefixes) == 0) == failed
        assert stream(engine, prompt)[0] == wanted
    executor.failstop = healthy


def test_a_position_that_is_gone_is_fatal(executors, monkeypatch):
    executor = executors("plain")
    engine = engine_of(executor)
    engine.add(Request(request_id="a", prompt_ids=[5] * 20))
    for _ in range(5):
        engine.step()
    length = int(executor.cache.slots.length[engine.scheduler.running[0].slot])
    for position, word in [(length, 0), (length - 1, 0), (length - 2, BIT_PLAN)]:
        executor.save(engine.scheduler.running[0].slot, position, 0)
        assert int(executor.health) == word
    executor.health = executor.health - executor.health
    monkeypatch.setattr(executor, "_pool", None)
    with pytest.raises(ValueError, match="prefix_cache is 0"):
        executor.save(1, 1, 0)
