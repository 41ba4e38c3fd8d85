"""The engine on a fake model: texts, stops, aborts, errors, run-ahead and its streams."""

import numpy as np
import pytest
from fakes import END, GUIDES, VOCAB, FakeExecutor, config, continuation

from k3jax.decode.config import DecodeConfig
from k3jax.engine import Engine
from k3jax.request import Request, SamplingParams

RUN = DecodeConfig(
    max_requests=4, max_context=64, page_size=4, prefill_buckets=((1, 8), (1, 32), (2, 8))
)


@pytest.fixture
def engine():
    return Engine(FakeExecutor(RUN, pages=70), config(), RUN)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def long_prompt(tokens, length=6):
    """A prompt whose continuation does not stop within so many tokens."""
    return next(
        prompt
        for prompt in (prompt_of(length, seed) for seed in range(500))
        if len(continuation(prompt, tokens)[0]) == tokens
    )


def add(engine, name, prompt, **params):
    engine.add(Request(request_id=name, prompt_ids=prompt, params=SamplingParams(**params)))


def drain(engine):
    """All deltas until nothing is left to do, by request."""
    found = {}
    while engine.has_work():
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def text(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def test_stops_at_max_tokens(engine):
    prompt = long_prompt(9)
    add(engine, "a", prompt, max_tokens=9)
    deltas = drain(engine)["a"]
    assert text(deltas) == continuation(prompt, 9)[0]
    assert [delta.finish_reason for delta in deltas] == [None] * 8 + ["length"]
    assert deltas[-1].completion_tokens == 9
    assert deltas[-1].prompt_tokens == 6
    rows = sum(count for kind, count in engine.executor.steps if kind == "decode")
    assert rows == 8  # the first came with the prefill; none beyond the limit


def test_goes_on_from_what_another_engine_said(engine):
    prompt = long_prompt(9)
    tokens = continuation(prompt, 9)[0]
    engine.add(
        Request(
            request_id="a",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=9, logprobs=0, prompt_logprobs=0),
            generated=tokens[:4],
        )
    )
    deltas = drain(engine)["a"]
    assert text(deltas) == tokens[4:]
    assert [delta.completion_tokens for delta in deltas] == [5, 6, 7, 8, 9]
    assert all(delta.prompt_tokens == 6 and delta.prompt_logprobs is None for delta in deltas)
    for wrong, reason in [(tokens, "generated already"), ([VOCAB], "token id")]:
        params = SamplingParams(max_tokens=9)
        request = Request(request_id="b", prompt_ids=prompt, params=params, generated=wrong)
        with pytest.raises(ValueError, match=reason):
            engine.add(request)
    assert not engine.has_work()


def test_stops_at_a_stop_token_and_discards_the_row_in_flight(engine):
    prompt = long_prompt(12)
    tokens = continuation(prompt, 12)[0]
    stop = tokens[5]
    kept = tokens[: tokens.index(stop)]
    add(engine, "a", prompt, max_tokens=12, stop_token_ids=[stop])
    deltas = drain(engine)["a"]
    assert text(deltas) == kept
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == ("stop", stop)
    assert deltas[-1].completion_tokens == len(kept) + 1
    assert engine.allocator.in_use == 0


def test_ignore_eos_goes_on(engine):
    prompt = next(
        prompt_of(6, seed) for seed in range(5000) if continuation(prompt_of(6, seed), 8)[1] == END
    )
    add(engine, "stops", prompt, max_tokens=8)
    add(engine, "goes_on", prompt, max_tokens=8, ignore_eos=True)
    found = drain(engine)
    assert found["stops"][-1].stop_token == END
    assert text(found["goes_on"]) == continuation(prompt, 8, stops=())[0]


def test_max_tokens_defaults_to_the_context(engine):
    add(engine, "a", prompt_of(10), ignore_eos=True)
    deltas = drain(engine)["a"]
    assert len(text(deltas)) == 54
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_abort_at_any_time(engine, steps):
    """Waiting, in prefill, decoding or in flight: one last delta, and the others never notice."""
    prompts = {name: long_prompt(10, length) for name, length in [("a", 5), ("b", 20), ("c", 7)]}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=10)
    found = {name: [] for name in prompts}
    for step in range(100):
        if step == steps:
            engine.abort("b")
            engine.abort("b")
            engine.abort("unknown")
        for delta in engine.step():
            found[delta.request_id].append(delta)
        if not engine.has_work():
            break
    assert [d.finish_reason for d in found["b"] if d.finish_reason] == ["abort"]
    assert found["b"][-1].finish_reason == "abort"
    for name in ("a", "c"):
        assert text(found[name]) == continuation(prompts[name], 10)[0]
    assert engine.allocator.in_use == 0


def test_a_slot_is_free_at_once_after_an_abort(engine):
    """A newcomer takes the slot and pages of a request whose row is still in flight."""
    for name in "abcd":
        add(engine, name, long_prompt(20), max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.abort("a")
    newcomer = long_prompt(10, 9)
    add(engine, "e", newcomer, max_tokens=10)
    found = drain(engine)
    assert text(found["e"]) == continuation(newcomer, 10)[0]


def test_preempted_and_resumed_texts_are_the_same():
    engine = Engine(FakeExecutor(RUN, pages=20), config(), RUN)
    prompts = {str(n): long_prompt(30, 5 + n) for n in range(4)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=30)
    found = drain(engine)
    assert engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert text(found[name]) == continuation(prompt, 30)[0]


def test_a_row_that_is_not_finite_ends_its_request_alone(engine):
    good, bad = long_prompt(10), [93, *prompt_of(4)]
    engine.executor.poisoned = {93}
    add(engine, "good", good, max_tokens=10)
    add(engine, "bad", bad, max_tokens=10)
    found = drain(engine)
    assert [delta.finish_reason for delta in found["bad"]] == ["error"]
    assert "not finite" in found["bad"][0].error
    assert text(found["good"]) == continuation(good, 10)[0]
    assert engine.stats().finished == {"error": 1, "length": 1}


def test_a_fatal_health_bit_raises_its_name(engine):
    engine.executor.health = 8 | 16
    add(engine, "a", prompt_of(5))
    with pytest.raises(RuntimeError, match="contradicts the slots; ranks that chose"):
        drain(engine)


def test_a_step_is_dispatched_before_the_one_before_it_is_read(engine):
    add(engine, "a", long_prompt(6), max_tokens=6)
    assert engine.step() == []
    assert len(engine.executor.steps) == 1
    assert len(engine.step()) == 1
    assert len(engine.executor.steps) == 2


def test_what_cannot_be_served_is_refused(engine):
    add(engine, "a", prompt_of(4))
    for wrong, message in [
        (Request(request_id="a", prompt_ids=[1]), "'a' is in use"),
        (Request(request_id="b", prompt_ids=[]), "1 to 63 tokens"),
        (Request(request_id="b", prompt_ids=[1] * 64), "got 64"),
        (Request(request_id="b", prompt_ids=[1, VOCAB]), f"token id {VOCAB}"),
        (
            Request(request_id="b", prompt_ids=[1] * 60, params=SamplingParams(max_tokens=5)),
            "at most 4 can be generated",
        ),
        (
            Request(request_id="b", prompt_ids=[1], params=SamplingParams(stop_token_ids=[VOCAB])),
            "stop_token_ids",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add(wrong)
    assert len(drain(engine)) == 1


def test_a_grammar_makes_a_mask_for_each_token_that_is_sampled():
    """None for the chunks of its prompt before the last one, nor for who has no grammar."""
    engine = Engine(FakeExecutor(RUN, pages=70), config(), RUN, guides=GUIDES)
    add(engine, "a", prompt_of(50), max_tokens=5, ignore_eos=True, grammar="5")
    add(engine, "b", prompt_of(40), max_tokens=9, ignore_eos=True)
    ends = {name: deltas[-1].finish_reason for name, deltas in drain(engine).items()}
    assert ends == {"a": "length", "b": "length"}
    assert engine.executor.masks == 5
    assert sum(kind == "prefill" for kind, _ in engine.executor.steps) > 2


def test_streams_share_the_engine(engine):
    """Two generators drawn from in turns; one that is closed early frees its slot."""
    first, second = long_prompt(9), long_prompt(12, 8)
    one = engine.stream(first, SamplingParams(max_tokens=9))
    two = engine.stream(second, SamplingParams(max_tokens=12))
    three = engine.stream(prompt_of(5), SamplingParams(max_tokens=40, ignore_eos=True))
    texts = [[], []]
    next(three)
    three.close()
    for left, right in zip(one, two, strict=False):
        texts[0] += left.token_ids
        texts[1] += right.token_ids
    texts[1] += text(two)
    assert texts[0] == continuation(first, 9)[0]
    assert texts[1] == continuation(second, 12)[0]
    drain(engine)
    assert engine.allocator.in_use == 0


def test_logprobs_come_only_if_asked(engine):
    add(engine, "plain", long_prompt(4), max_tokens=4)
    add(engine, "asks", long_prompt(4), max_tokens=4, logprobs=2)
    found = drain(engine)
    assert all(delta.logprobs is None for delta in found["plain"])
    for delta in found["asks"]:
        (entry,) = delta.logprobs
        assert entry.token_id == delta.token_ids[0]
        assert entry.logprob == -0.5 * entry.token_id
        assert len(entry.top) == 2


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_is_scored_once_though_it_is_read_twice(engine, steps, monkeypatch):
    """Its request is preempted with its first chunk in flight, its second one, or a token."""
    prompt, plan = prompt_of(45), engine.scheduler
    add(engine, "a", prompt, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    deltas = [delta for _ in range(steps) for delta in engine.step()]
    sequence = engine._sequences["a"]
    with monkeypatch.context() as patch:
        patch.setattr(plan, "decide", lambda: plan._preempt(sequence))
        deltas += engine.step()
    deltas += drain(engine)["a"]
    assert text(deltas) == continuation(prompt, 4, stops=())[0]
    (scores,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert scores[0] is None
    assert [(entry.token_id, entry.logprob) for entry in scores[1:]] == [
        (token, -0.5 * token) for token in prompt[1:]
    ]


def test_the_stop_token_has_its_own_logprob(engine):
    prompt = long_prompt(12)
    tokens = continuation(prompt, 12)[0]
    stop = tokens[5]
    add(engine, "asks", prompt, max_tokens=12, stop_token_ids=[stop], logprobs=1)
    add(engine, "plain", prompt, max_tokens=12, stop_token_ids=[stop])
    found = drain(engine)
    *before, last = found["asks"]
    assert all(delta.stop_logprob is None for delta in [*before, *found["plain"]])
    assert (last.token_ids, last.logprobs) == ([], [])
    assert (last.stop_logprob.token_id, last.stop_logprob.logprob) == (stop, -0.5 * stop)
    assert len(last.stop_logprob.top) == 1


def test_counters(engine):
    add(engine, "a", long_prompt(5), max_tokens=5)
    drain(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (6, 5)
    assert stats.steps == {"stock/prefill": 1, "stock/backend": 4}
    assert (stats.waiting, stats.running, stats.slots_in_use, stats.pages_in_use) == (0, 0, 0, 0)
