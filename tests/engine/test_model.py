"""The engine on a real decoder in float32: a request's text does not depend on its company."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.cache import MlaPages
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.request import Request, SamplingParams

RUN = DecodeConfig(
    dtype="float32",
    max_requests=8,
    max_context=128,
    page_size=8,
    builds=((1, 1), (1, 8)),
    prefill_buckets=((2, 16),),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PENALIZED = SamplingParams(
    temperature=0.0,
    max_tokens=20,
    ignore_eos=True,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias={5: 1.0},
)


@pytest.fixture(scope="module")
def model(golden):
    """(config, executor) of the tiny Kimi-K3."""
    path = golden / "k3-tiny-a"
    config = K3Config.from_file(path)
    mesh = make_mesh(1)
    return config, Executor(load_params(path, config, mesh), config, RUN, mesh)


@pytest.fixture(scope="module")
def recorded(golden):
    """What other implementations answer for this model."""
    with np.load(golden / "k3-tiny-a" / "golden.npz") as arrays:
        return {name: arrays[name] for name in ("seq1.input_ids", "seq1.greedy", "seq1.logits")}


@pytest.fixture
def engine(model):
    config, executor = model
    return Engine(executor, config, RUN)


class FewPages:
    """The executor as if its cache had fewer pages."""

    def __init__(self, executor, pages):
        self.sizes = replace(executor.sizes, pages=pages)
        self.admit, self.run = executor.admit, executor.run
        self.plan, self.reason = executor.plan, executor.reason
        self.save, self.resume = executor.save, executor.resume


def serve(engine, requests, joins=(), aborts=()):
    """Texts by name; request n joins at step joins[n] (0); (step, name) in aborts ends one."""
    joins = dict(zip(requests, joins, strict=False))
    texts = {name: [] for name in requests}
    step = 0
    while engine.has_work() or step <= max(joins.values(), default=0):
        for name, (prompt, params) in requests.items():
            if joins.get(name, 0) == step:
                engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
        for when, name in aborts:
            if when == step:
                engine.abort(name)
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
        step += 1
    assert engine.allocator.in_use == 0
    return texts


def alone(engine, prompt, params):
    return serve(engine, {"a": (prompt, params)})["a"]


def prompt_of(length):
    return np.random.default_rng(length).integers(0, 500, length).tolist()


def test_greedy_text_is_the_recorded_one(engine, recorded):
    prompt = recorded["seq1.input_ids"].tolist()
    params = replace_params(GREEDY, max_tokens=24)
    assert alone(engine, prompt, params) == recorded["seq1.greedy"].tolist()


def replace_params(params, **changes):
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, **changes})


@pytest.mark.parametrize("company", [3, 8])
def test_greedy_text_is_the_same_in_company(engine, company):
    """Requests of all lengths that join while others decode and leave before them."""
    requests = {}
    for n in range(company):
        requests[str(n)] = (prompt_of(3 + 7 * n), replace_params(GREEDY, max_tokens=20 - 2 * n))
    together = serve(engine, requests, joins=[3 * (n % 4) for n in range(company)])
    for name, (prompt, params) in requests.items():
        assert together[name] == alone(engine, prompt, params)


def test_same_seed_same_text_in_company(engine):
    seeded = SamplingParams(
        seed=11, temperature=1.0, top_p=0.9, top_k=50, max_tokens=20, ignore_eos=True
    )
    wild = SamplingParams(seed=3, temperature=1.5, min_p=0.02, max_tokens=12, ignore_eos=True)
    requests = {
        "seeded": (prompt_of(9), seeded),
        "greedy": (prompt_of(20), GREEDY),
        "penalized": (prompt_of(6), PENALIZED),
        "wild": (prompt_of(30), wild),
        "twin": (prompt_of(9), seeded),
    }
    together = serve(engine, requests, joins=[4, 0, 2, 0, 9])
    assert together["seeded"] == together["twin"]
    for name, (prompt, params) in requests.items():
        assert together[name] == alone(engine, prompt, params)
    other = replace_params(seeded, seed=12)
    assert alone(engine, prompt_of(9), other) != together["seeded"]


def test_preempted_and_resumed_texts_are_the_same(model, engine):
    """Pages run out; penalties and seeds must see what was generated before."""
    config, executor = model
    small = Engine(FewPages(executor, 14), config, RUN)
    requests = {
        "greedy": (prompt_of(20), replace_params(GREEDY, max_tokens=30)),
        "penalized": (prompt_of(13), replace_params(PENALIZED, max_tokens=40)),
        "seeded": (prompt_of(11), SamplingParams(seed=5, max_tokens=40, ignore_eos=True)),
    }
    squeezed = serve(small, requests)
    assert small.stats().preemptions > 0
    for name, (prompt, params) in requests.items():
        assert squeezed[name] == alone(engine, prompt, params)


def test_aborts_in_flight_leave_the_others_alone(engine):
    """Slots and pages of aborted requests are taken over at once by those that wait."""
    requests = {str(n): (prompt_of(5 + n), GREEDY) for n in range(11)}
    aborts = [(1, "0"), (4, "1"), (7, "4"), (7, "5")]
    texts = serve(engine, requests, aborts=aborts)
    for name, (prompt, params) in requests.items():
        expected = alone(engine, prompt, params)
        if name in {name for _, name in aborts}:
            assert texts[name] == expected[: len(texts[name])]
            assert len(texts[name]) < len(expected)
        else:
            assert texts[name] == expected


def poison(executor, slot=None):
    """Fill the recurrent states (of one slot, or all) and, for all, the latents with NaN."""

    def spoil(layer):
        if isinstance(layer, MlaPages):
            return layer if slot else MlaPages(jnp.full_like(layer.latents, jnp.nan))
        where = jnp.arange(layer.state.shape[0]) == slot if slot else jnp.bool_(True)
        where = where.reshape(-1, 1, 1, 1)
        return replace(layer, state=jnp.where(where, jnp.nan, layer.state))

    executor.cache = replace(executor.cache, layers=tuple(map(spoil, executor.cache.layers)))


def test_what_slots_and_pages_held_does_not_matter(model, engine):
    _, executor = model
    requests = {str(n): (prompt_of(4 + 6 * n), GREEDY) for n in range(3)}
    expected = serve(engine, requests)
    poison(executor)
    assert serve(engine, requests) == expected


def test_a_row_that_is_not_finite_ends_its_request_alone(model, engine):
    """The request whose state is spoiled fails; the next tenant of its slot starts from zero."""
    _, executor = model
    good, bad = (prompt_of(6), GREEDY), (prompt_of(9), GREEDY)
    expected = alone(engine, *good)
    for name, (prompt, params) in {"good": good, "bad": bad}.items():
        engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
    deltas = [delta for _ in range(4) for delta in engine.step()]
    slot = next(item.slot for item in engine.scheduler.running if item.request_id == "bad")
    poison(executor, slot)
    while engine.has_work():
        deltas += engine.step()
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
    assert (ends["bad"].finish_reason, ends["good"].finish_reason) == ("error", "length")
    text = [token for delta in deltas if delta.request_id == "good" for token in delta.token_ids]
    assert text == expected
    again = {str(n): good for n in range(8)}
    assert all(text == expected for text in serve(engine, again).values())


def test_prompt_logprobs_are_the_recorded_ones(engine, recorded):
    """Also at the seams of chunks, and beside a request that asks for none."""
    prompt = recorded["seq1.input_ids"].tolist()
    params = replace_params(GREEDY, max_tokens=2, prompt_logprobs=3, logprobs=1)
    engine.add(Request(request_id="other", prompt_ids=prompt_of(20), params=GREEDY))
    scores, tokens = None, []
    for delta in engine.stream(prompt, params):
        scores = scores or delta.prompt_logprobs
        tokens += delta.logprobs
    oracle = np.asarray(jax.nn.log_softmax(recorded["seq1.logits"].astype(np.float32), axis=-1))
    assert scores[0] is None
    assert [entry.token_id for entry in scores[1:]] == prompt[1:]
    for row, entry in enumerate(scores[1:]):
        np.testing.assert_allclose(entry.logprob, oracle[row, prompt[row + 1]], atol=6e-4)
        assert [token for token, _ in entry.top] == np.argsort(-oracle[row])[:3].tolist()
    np.testing.assert_allclose(tokens[0].logprob, oracle[-1, tokens[0].token_id], atol=6e-4)
    assert tokens[0].top == [(tokens[0].token_id, tokens[0].logprob)]


def test_nothing_compiles_after_the_executor_is_built(engine, caplog):
    """Whatever mixture of wishes comes, no step is traced or compiled."""
    serve(engine, {"warm": (prompt_of(4), GREEDY)})
    requests = {
        "a": (prompt_of(4), SamplingParams(seed=1, max_tokens=6, top_k=4, logprobs=5)),
        "b": (prompt_of(40), PENALIZED),
        "c": (prompt_of(17), SamplingParams(max_tokens=4, prompt_logprobs=2, min_tokens=2)),
    }
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        serve(engine, requests, joins=[0, 2, 5])
    assert [record.message for record in caplog.records if "ompil" in record.message] == []
