"""The scheduler's decisions, and its invariants under random traffic through the whole engine."""

import pytest
from fakes import FakeExecutor, config, continuation, finish
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.decode.config import DecodeConfig
from k3jax.engine import Engine
from k3jax.pages import PageAllocator
from k3jax.request import Request, SamplingParams
from k3jax.scheduler import Decode, Prefill, Scheduler, Sequence, choose_bucket

BUCKETS = ((1, 8), (1, 32), (2, 8))


def scheduler(pages=64, requests=4, budget=None, buckets=BUCKETS, **options):
    return Scheduler(
        PageAllocator(pages, 4),
        requests=requests,
        table_pages=16,
        **{"builds": ((1, 1), (1, 2), (1, 4)), **options},
        buckets=buckets,
        token_budget=budget,
    )


def sequence(name, prompt=5, max_tokens=8):
    return Sequence(name, [1] * prompt, prompt, max_tokens, SamplingParams())


def land(step):
    """What the engine does when a step's tokens are read."""
    if isinstance(step, Decode):
        sequences, rows = step.sequences, step.rows
    else:
        sequences, rows = [chunk.sequence for chunk in step.chunks if chunk.final], 1
    for item in sequences:
        item.rows_in_flight -= rows
        item.steps_in_flight -= 1
        item.tokens.append(1)


def names(step):
    if isinstance(step, Prefill):
        return [chunk.sequence.request_id for chunk in step.chunks]
    return [item.request_id for item in step.sequences]


def test_prefill_and_decode_alternate_under_the_budget():
    """With a request decoding, a long prompt gets one chunk between two decode steps."""
    plan = scheduler(budget=32)
    plan.add(sequence("a", max_tokens=30))
    kinds = []
    for turn in range(9):
        if turn == 2:
            plan.add(sequence("long", prompt=40, max_tokens=5))
        step = plan.decide()
        kinds.append("P" if isinstance(step, Prefill) else "D")
        land(step)
    assert "".join(kinds) == "PDPDPDDDD"


def test_a_long_prompt_does_not_hold_up_a_short_one():
    plan = scheduler(buckets=((1, 8),))
    plan.add(sequence("long", prompt=60, max_tokens=2))
    first = plan.decide()
    plan.add(sequence("short", prompt=6))
    second = plan.decide()
    third = plan.decide()
    assert names(first) == ["long"]
    assert "short" in names(second) + names(third)


def test_run_ahead_reserves_pages_for_rows_in_flight():
    """A step is decided before the one before it is read; its row has a page all the same."""
    plan = scheduler()
    item = sequence("a", prompt=4, max_tokens=8)
    plan.add(item)
    first = plan.decide()
    assert first.page_updates == [(item.slot, 0, item.pages[0])]
    second = plan.decide()  # position 4, the first token not read yet
    assert second.page_updates == [(item.slot, 1, item.pages[1])]
    land(first)
    third = plan.decide()
    assert isinstance(third, Decode)
    assert third.page_updates == []


def test_no_row_is_decided_beyond_max_tokens():
    plan = scheduler()
    plan.add(sequence("a", max_tokens=2))
    first, second = plan.decide(), plan.decide()
    assert isinstance(first, Prefill)
    assert isinstance(second, Decode)
    assert plan.decide() is None


def test_the_latest_admitted_is_preempted_and_comes_back_in_order():
    plan = scheduler(pages=1 + 5)  # 20 tokens for all
    older, newer = sequence("older", 7, 13), sequence("newer", 5, 8)
    plan.add(older)
    land(plan.decide())
    plan.add(newer)
    land(plan.decide())
    plan.add(sequence("last", 3, 2))
    while not plan.preemptions:
        land(plan.decide())
    assert newer.slot == 0
    assert older.slot > 0
    assert [item.request_id for item in plan.waiting] == ["newer", "last"]
    plan.release(older)
    step = plan.decide()
    assert names(step)[0] == "newer"
    chunk = step.chunks[0]
    assert (chunk.start, chunk.count) == (0, min(len(newer.tokens), step.rows))


SPECULATIVE = {"builds": ((4, 1), (2, 2), (1, 4)), "buckets": ((1, 8), (4, 8))}


@pytest.mark.parametrize(
    ("requests", "build"), [(1, (4, 1)), (2, (2, 2)), (3, (1, 4)), (4, (1, 4))]
)
def test_the_more_requests_the_fewer_drafts(requests, build):
    plan = scheduler(**SPECULATIVE)
    for n in range(requests):
        plan.add(sequence(str(n), max_tokens=20))
    step = plan.decide()
    assert len(step.chunks) == requests
    land(step)
    step = plan.decide()
    assert (step.rows, step.requests) == build
    assert len(step.sequences) == requests


def test_nobody_loses_pages_to_drafts():
    """A page is missing for the drafts of two, none for their last tokens."""
    plan = scheduler(pages=1 + 5, **SPECULATIVE)
    for name in "ab":
        plan.add(sequence(name, prompt=7, max_tokens=2))
    land(plan.decide())
    step = plan.decide()
    assert (step.rows, step.requests) == (1, 4)
    assert plan.preemptions == 0


def test_pages_ahead_for_a_draft_model():
    plan = scheduler(lookahead=5, **SPECULATIVE)
    plan.add(sequence("a", prompt=3, max_tokens=8))
    land(plan.decide())
    step = plan.decide()
    assert [index for _, index, _ in step.page_updates] == [1, 2]  # for tokens below 3 + 4 + 5


def test_a_sequence_that_never_fits_is_refused():
    plan = scheduler(pages=5)
    with pytest.raises(ValueError, match="5 pages of 4 tokens; there are 4"):
        plan.add(sequence("a", 10, 8))
    plan.add(sequence("b", 10, 7))


@pytest.mark.parametrize(
    ("missing", "bucket"),
    [([5], (1, 8)), ([20], (1, 32)), ([5, 6], (2, 8)), ([200, 6], (1, 32)), ([1], (1, 8))],
)
def test_bucket_that_gets_most_done(missing, bucket):
    assert choose_bucket(BUCKETS, missing) == bucket


def owners(engine):
    """Every page and slot has one owner at most, and what is free is not owned."""
    plan = engine.scheduler
    pages = [page for item in plan.running for page in item.pages]
    slots = [item.slot for item in plan.running]
    assert len(set(pages)) == len(pages) == plan.allocator.in_use
    assert len(set(slots)) == len(slots) == plan.slots - len(plan._free_slots)
    assert all(slots)
    assert not set(slots) & set(plan._free_slots)
    assert all(not item.slot and not item.pages for item in plan.waiting)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 20)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


DRAFTERS = (
    {},
    {"drafter": "ngram", "num_spec": 3, "builds": ((4, 1), (2, 2), (1, 4))},
    {"drafter": "a model", "num_spec": 2, "builds": ((3, 4),)},
)


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.integers(16, 27), st.integers(1, 4), st.sampled_from(DRAFTERS))
def test_random_traffic_leaks_nothing_and_spoils_no_text(events, pages, requests, drafting):
    """Requests come, go and are preempted: each text is right, and all is free at the end.

    One in three has its prompt scored.
    """
    if drafting:
        requests = 4
    run = DecodeConfig(
        **drafting,
        max_requests=requests,
        max_context=48,
        page_size=4,
        prefill_buckets=((1, 8), (2, 4)),
    )
    engine = Engine(FakeExecutor(run, pages), config(), run)
    wanted, texts, reasons, scores = {}, {}, {}, {}

    def step():
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            if delta.prompt_logprobs is not None:
                found = [
                    entry and (entry.token_id, entry.logprob) for entry in delta.prompt_logprobs
                ]
                assert found == scores.pop(delta.request_id)
            if delta.finish_reason:
                assert delta.request_id not in reasons
                reasons[delta.request_id] = (delta.finish_reason, delta.stop_token)
        owners(engine)

    for kind, *numbers in events:
        if kind == "add":
            length, max_tokens = numbers
            name = str(len(wanted))
            prompt = [(length * 7 + len(wanted) * 13 + n) % 90 for n in range(length)]
            max_tokens = min(max_tokens, 48 - length)
            scored = 0 if len(wanted) % 3 == 2 else None
            params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored)
            engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
            if scored is not None:
                scores[name] = [None, *((token, -0.5 * token) for token in prompt[1:])]
            wanted[name], texts[name] = continuation(prompt, max_tokens), []
        elif kind == "abort":
            engine.abort(str(numbers[0]))
            owners(engine)
        else:
            for _ in range(numbers[0]):
                step()
    finish(engine, step)
    assert engine.allocator.in_use == 0
    assert not engine.scheduler.running
    for name, (tokens, stop) in wanted.items():
        if reasons[name][0] == "abort":
            assert texts[name] == tokens[: len(texts[name])]
        else:
            assert texts[name] == tokens
            assert reasons[name] == ("length" if stop is None else "stop", stop)
            assert name not in scores
