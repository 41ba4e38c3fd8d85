"""Prefixes on a fake model: what is found, what goes first, and that nothing is lost or spoiled."""

import numpy as np
import pytest
from fakes import GUIDES, FakeExecutor, config, continuation, finish
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_engine import add, drain, long_prompt, prompt_of, text

from k3jax.decode.config import DecodeConfig
from k3jax.engine import Engine
from k3jax.keeper import last_position
from k3jax.pages import PageAllocator
from k3jax.prefix import WIDTH, PrefixBudget, PrefixCache, key_of, prefix_budget
from k3jax.request import Request, SamplingParams

RUN = DecodeConfig(
    max_requests=4, max_context=64, page_size=4, prefill_buckets=((1, 8), (1, 32), (2, 8))
)
ROOM = PrefixBudget(snapshots=8, total_bytes=1000, snapshot_bytes=10, page_bytes=1)


def engine_of(pages=70, room=ROOM, run=RUN, worth=8):
    engine = Engine(FakeExecutor(run, pages, room), config(), run, guides=GUIDES)
    engine.prefixes.worth, engine.prefixes._block = worth, WIDTH * 8
    return engine


def ask(engine, prompt, **params):
    """(text, cached tokens) of a request that is alone; whatever is in flight lands."""
    add(engine, "alone", prompt, **params)
    deltas = drain(engine)["alone"]
    return text(deltas), deltas[-1].cached_tokens


def prefixes(*, pages=20, worth=8, **room):
    budget = PrefixBudget(**{**vars_of(ROOM), **room})
    return PrefixCache(PageAllocator(pages, 4), budget, worth=worth)


def vars_of(budget):
    return {name: getattr(budget, name) for name in PrefixBudget.__dataclass_fields__}


def save(cache, tokens, owner="a", step=0, **options):
    """Save a prefix whose request ends at once; the snapshot's number."""
    pages = cache.allocator.allocate(cache.allocator.pages_for(len(tokens)))
    number = cache.save(key_of(tokens), pages, owner, step, **options)
    cache.allocator.release(pages)
    return number


def found(cache, tokens, most=None):
    entry = cache.use(key_of(tokens), len(tokens) if most is None else most)
    return 0 if entry is None else entry.tokens


def test_the_longest_prefix_is_found_and_one_token_is_left_to_read():
    cache = prefixes()
    for count in (4, 9, 13):
        save(cache, list(range(count)))
    save(cache, [0, 1, 2, 3, 5, 6])
    assert found(cache, list(range(20))) == 13
    assert found(cache, list(range(13)), most=12) == 9
    assert found(cache, [*range(9), 77]) == 9
    assert found(cache, [1, *range(9)]) == 0
    assert cache.allocator.in_use == 0


def test_an_entry_counts_when_its_step_has_landed():
    cache = prefixes()
    save(cache, [1, 2, 3, 4], step=3)
    assert found(cache, [1, 2, 3, 4, 5]) == 0
    cache.prove(2)
    assert found(cache, [1, 2, 3, 4, 5]) == 0
    cache.prove(3)
    assert found(cache, [1, 2, 3, 4, 5]) == 4


def test_the_least_recently_used_goes_first_and_cold_ones_before_all():
    cache = prefixes(snapshots=3)
    for first in (10, 20, 30):
        save(cache, [first] * 4)
    assert found(cache, [10] * 5) == 4
    save(cache, [40] * 4, cold=True)  # for 20
    save(cache, [50] * 4)  # for 40
    assert [found(cache, [first] * 5) for first in (10, 20, 30, 40, 50)] == [4, 0, 4, 0, 4]
    assert (len(cache), cache.evictions) == (3, 2)
    assert cache.allocator.kept == cache.allocator.idle == 3


def test_the_bound_in_bytes_holds_for_snapshots_and_pages():
    cache = prefixes(total_bytes=25)
    assert save(cache, [1] * 4 * 16) is None  # 10 + 16: more than all
    save(cache, [1] * 4)
    save(cache, [2] * 4)
    assert cache.size == 22
    save(cache, [3] * 16)
    assert cache.size == 25
    assert [found(cache, [first] * 17) for first in (1, 2, 3)] == [0, 4, 16]


def test_requests_that_run_come_first():
    cache = prefixes(pages=1 + 6)
    for first in (1, 2, 3):
        save(cache, [first] * 8)
    assert (cache.allocator.free, cache.allocator.idle) == (0, 6)
    assert cache.make_room(3)
    assert (len(cache), cache.allocator.free) == (1, 4)
    assert not cache.make_room(7)
    assert len(cache) == 1


def test_where_prompts_part():
    cache = prefixes(worth=8)
    save(cache, [*range(20), 50])
    assert cache.branch(key_of([*range(12), 90, 91]), 0, 13) == 12
    assert cache.branch(key_of([*range(7), 90, 91]), 0, 8) == 0  # not worth a step
    assert cache.branch(key_of([*range(12), 90, 91]), 5, 13) == 0
    assert cache.branch(key_of([*range(20), 50]), 0, 20) == 20


SIZES = st.integers(1, 11)
TEXTS = st.builds(lambda size, other: [int(n == other) for n in range(size)], SIZES, SIZES)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), TEXTS, st.booleans()),
        st.tuples(st.just("use"), TEXTS, st.integers(0, 2)),
        st.tuples(st.just("room"), st.just([]), st.integers(0, 14)),
        st.tuples(st.just("forget"), st.just([]), st.integers(0, 40)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.sampled_from([1, 3, 8]))
def test_the_tree_of_prefixes_says_what_a_walk_through_all_would_say(calls, block):
    """What is found, where texts part, what is there already and what goes first."""
    budget = PrefixBudget(snapshots=5, total_bytes=60, snapshot_bytes=10, page_bytes=1)
    cache = PrefixCache(PageAllocator(15, 8), budget, worth=2)
    cache._block = WIDTH * block
    order = []  # entries from the first to go to the last
    for number, (call, tokens, option) in enumerate(calls):
        cache.prove(number)
        key, kept = key_of(tokens), {entry.key: entry for entry in order}
        if call == "save":
            pages = cache.allocator.allocate(cache.allocator.pages_for(len(tokens)))
            if pages is None:
                continue
            saved = cache.save(key, pages, str(number), number + 2, cold=option)
            cache.allocator.release(pages)
            assert (saved is None) == (key in kept)
            if saved is None:
                order.append(order.pop(order.index(kept[key])))
            else:
                order = order[len(order) + 1 - len(cache) :]
                order.insert(0 if option else len(order), cache._entries[saved])
        elif call == "use":
            most = len(tokens) - option
            known = [entry for entry in order if tokens[: entry.tokens] == read(entry)]
            known = [entry for entry in known if entry.tokens <= most and entry.step <= number]
            longest = max(known, key=lambda entry: entry.tokens, default=None)
            assert cache.use(key, most) is longest
            if longest is not None:
                order.append(order.pop(order.index(longest)))
            part = max((alike(tokens[:most], read(entry)) for entry in order), default=0)
            assert cache.branch(key, option, most) == (part if part >= option + 2 else 0)
        elif call == "room" and cache.make_room(option):
            order = order[len(order) - len(cache) :]
        elif call == "forget":
            cache.forget(str(option), None)
            order = [entry for entry in order if entry.owner != str(option)]
        assert list(cache._entries.values()) == order
    assert cache.make_room(14)
    assert not cache._tree


def read(entry):
    return np.frombuffer(entry.key, np.int32).tolist()


def alike(one, other):
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("known", "emitted", "pending", "running", "lag", "wanted"),
    [
        (10, 10, 1, False, 0, 9),  # one row pending: all but the last token
        (10, 10, 0, False, 0, 9),  # it came with the prompt's end
        (10, 10, 1, True, 0, 10),  # the row in flight reads the last token
        (10, 11, 3, True, 0, 10),  # one token beyond the stop was accepted
        (10, 12, 3, True, 0, None),  # two: the state is beyond the turn's end
        (10, 12, 3, False, 0, 10),  # nothing in flight: it can go back
        (10, 14, 3, False, 0, 10),
        (10, 15, 3, False, 0, None),
        (10, 11, 3, True, 1, None),  # the draft model is a token ahead
        (10, 10, 3, True, 1, 10),
        (10, 14, 3, False, 1, None),
    ],
)
def test_how_far_a_snapshot_goes_back(known, emitted, pending, running, lag, wanted):
    assert last_position(known, emitted, pending, running=running, lag=lag) == wanted


def test_how_much_is_set_aside():
    each, pages = (100, 10), 16
    assert prefix_budget(0, 10_000, each, 4, pages).snapshots == 0
    assert prefix_budget(None, -5, each, 4, pages).snapshots == 0
    given = prefix_budget(1000, None, each, 4, pages)
    assert (given.snapshots, given.pages(pages)) == (8, 20)  # two pages of 16 for each
    assert prefix_budget(None, None, each, 1, pages).snapshots == 8
    share = prefix_budget(None, 8000, each, 4, pages)
    assert (share.total_bytes, share.snapshots) == (2000, 16)
    assert prefix_budget(None, 10**9, each, 4, pages).snapshots == 32
    assert prefix_budget(110, None, each, 4, pages).snapshots == 1
    assert prefix_budget(109, None, each, 4, pages).snapshots == 0


def test_the_next_turn_goes_on_from_the_last():
    engine = engine_of()
    prompt = long_prompt(9, 10)
    said, cached = ask(engine, prompt, max_tokens=9)
    assert (said, cached) == (continuation(prompt, 9)[0], 0)
    longer = [*prompt, *said, 1, 2, 3]
    answer, cached = ask(engine, longer, max_tokens=5)
    assert (answer, cached) == (continuation(longer, 5)[0], 18)
    assert ask(engine, [*prompt, 95, 94], max_tokens=1)[1] == 10
    assert engine.stats().prefix_hits == 28
    assert engine.stats().prefix_queries == 10 + 22 + 12


def test_a_turn_that_stopped_has_its_stop_token():
    engine = engine_of()
    prompt = long_prompt(12, 10)
    stop = continuation(prompt, 12)[0][5]
    said, _ = ask(engine, prompt, max_tokens=12, stop_token_ids=[stop])
    assert ask(engine, [*prompt, *said, stop, 7], max_tokens=1)[1] == len(prompt) + len(said) + 1


def test_a_common_beginning_is_kept_when_it_comes_twice():
    engine, system = engine_of(), prompt_of(22, 3)
    cached = [ask(engine, [*system, 91 + n, *prompt_of(5, n)], max_tokens=1)[1] for n in range(3)]
    assert cached == [0, 0, 22]
    same = prompt_of(17, 9)
    assert [ask(engine, same, max_tokens=1)[1] for _ in range(3)] == [0, 0, 16]


def test_requests_that_want_prompt_logprobs_are_computed_whole():
    engine, prompt = engine_of(), prompt_of(20)
    for _ in range(2):
        add(engine, "a", [*prompt, 1, 2], max_tokens=1, prompt_logprobs=0)
        sequence = engine._sequences["a"]
        drain(engine)
        assert sequence.cached == 0
    assert ask(engine, [*prompt, 1, 2, 3], max_tokens=1)[1] == 22


def test_a_request_that_failed_leaves_nothing():
    """Nor does that stay from which it went on."""
    engine = engine_of()
    engine.executor.poisoned = {93}
    prompt = long_prompt(3, 12)
    ask(engine, prompt, max_tokens=3)
    assert len(engine.prefixes) == 2
    add(engine, "bad", [*prompt, 93, *prompt_of(9)], max_tokens=5)
    assert [delta.finish_reason for delta in drain(engine)["bad"]] == ["error"]
    assert len(engine.prefixes) == 1  # of the turn's end, which was not used
    assert ask(engine, [*prompt, 93, 1], max_tokens=5)[1] == 0


@pytest.mark.parametrize("loss", ["abort", "preempt"])
def test_what_a_failed_step_went_on_from_goes_though_its_request_lost_the_slot(loss, monkeypatch):
    """The step is in flight when its request loses the slot; what is not finite lands later."""
    engine = engine_of()
    engine.executor.poisoned = {93}
    prompt = long_prompt(3, 12)
    ask(engine, prompt, max_tokens=3)
    add(engine, "bad", [*prompt, 93, *prompt_of(3)], max_tokens=5)
    engine.step()
    plan, sequence = engine.scheduler, engine._sequences["bad"]
    assert sequence.source is not None
    if loss == "abort":
        engine.abort("bad")
    else:
        monkeypatch.setattr(plan, "decide", lambda: plan._preempt(sequence))
    engine.step()
    monkeypatch.undo()
    assert ask(engine, [*prompt, 1], max_tokens=1)[1] == 0


def test_off():
    engine, prompt = engine_of(room=PrefixBudget()), prompt_of(20)
    assert [ask(engine, prompt, max_tokens=1)[1] for _ in range(3)] == [0, 0, 0]
    assert engine.stats().prefix_entries == 0


DRAFTERS = (
    {},
    {"drafter": "ngram", "num_spec": 3, "builds": ((4, 1), (2, 2), (1, 4))},
    {"drafter": "a model", "num_spec": 2, "builds": ((3, 4),)},
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 28), st.integers(1, 16)),
        st.tuples(st.just("next"), st.integers(0, 40), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 40), st.just(3)),
        st.tuples(st.just("step"), st.integers(1, 8), st.just(0)),
    ),
    max_size=40,
)


def accounts(engine):
    """Every page, slot and snapshot is free or has someone that holds it."""
    plan, kept, allocator = engine.scheduler, engine.prefixes, engine.allocator
    owned = {page for item in plan.running for page in item.pages}
    claimed = {page for entry in kept._entries.values() for page in entry.pages}
    assert allocator.in_use == len(owned)
    assert allocator.kept == len(claimed)
    assert allocator.idle == len(claimed - owned)
    assert allocator.free == allocator.capacity - len(owned | claimed)
    assert len(plan.running) + len(plan._free_slots) == plan.slots
    numbers = [*(entry.number for entry in kept._entries.values()), *kept._free]
    assert sorted(numbers) == list(range(kept.budget.snapshots))
    assert kept.size <= kept.budget.total_bytes


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(17, 40), st.integers(1, 5), st.sampled_from(DRAFTERS))
@example([("next", 1, 7)], 17, 1, DRAFTERS[1])  # reads 93 behind its last token
def test_random_conversations_lose_nothing_and_spoil_no_text(events, pages, snapshots, drafting):
    """Turns follow turns, fail, are aborted, preempted, and evict what others left.

    One in three has a grammar.
    """
    run = DecodeConfig(
        **drafting,
        max_requests=4,
        max_context=48,
        page_size=4,
        prefill_buckets=((1, 8), (2, 4)),
    )
    engine = engine_of(pages, PrefixBudget(snapshots, 60, 10, 1), run, worth=3)
    engine.executor.poisoned = {93}
    prompts, texts, ends = {}, {}, {}

    def start(prompt, max_tokens):
        prompt = prompt[:46]
        name, most = str(len(prompts)), min(max_tokens, 48 - len(prompt))
        grammar = str(most) if len(prompts) % 3 == 2 else None
        params = SamplingParams(max_tokens=most, grammar=grammar)
        engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
        prompts[name], texts[name] = (prompt, most), []

    def step():
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                ends[delta.request_id] = (delta.finish_reason, delta.stop_token)
        accounts(engine)

    for kind, number, count in events:
        before = prompts.get(str(number % max(1, len(prompts))), ([], 0))[0]
        said = texts.get(str(number % max(1, len(prompts))), [])
        if kind == "new":
            start([(number * 7 + n) % 90 for n in range(number)], count)
        elif kind == "next":
            start([*before, *said, *range(1 + number % 3)], count)
        elif kind == "fail":
            start([*before[:20], 93, *range(number % 20)], count)
        elif kind == "abort":
            engine.abort(str(number))
        else:
            for _ in range(number):
                step()
    finish(engine, step)
    for name, (prompt, max_tokens) in prompts.items():
        tokens, stop = continuation(prompt, max_tokens)
        # Drafts may be read that go on behind the end, and a poisoned one ends the request, too.
        read, _ = continuation(prompt, max_tokens + drafting.get("num_spec", 0), stops=())
        if 93 in prompt:
            assert ends[name][0] in ("error", "abort")
        elif ends[name][0] == "abort":
            assert texts[name] == tokens[: len(texts[name])]
        elif 93 not in read:
            assert texts[name] == tokens
            assert ends[name] == ("length" if stop is None else "stop", stop)
