"""Speculation with on-device drafters: it changes how many steps a text takes, never the text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import (
    GREEDY,
    PENALIZED,
    FewPages,
    alone,
    prompt_of,
    replace_params,
    serve,
)

from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.prefix import NOTHING_KEPT
from k3jax.request import SamplingParams
from k3jax.speculative import NgramDrafter, look_up
from k3jax.speculative_model import ModelDrafter, make_drafter, replicate

RUN = DecodeConfig(
    dtype="float32",
    max_requests=4,
    max_context=96,
    page_size=8,
    builds=((1, 4),),
    prefill_buckets=((2, 16),),
)
DRAFTED = {
    "ngram": {"num_spec": 3, "builds": ((1, 4), (4, 4))},
    "model": {"num_spec": 2, "builds": ((1, 4), (3, 4))},  # it is compiled once for each draft
}
SEEDED = SamplingParams(seed=11, temperature=1.0, top_p=0.9, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(golden):
    return golden / "k3-tiny-a"


@pytest.fixture(scope="module")
def parts(path):
    """(params, config, mesh)"""
    config, mesh = K3Config.from_file(path), make_mesh(1)
    return load_params(path, config, mesh), config, mesh


@pytest.fixture(scope="module")
def plain(parts):
    params, config, mesh = parts
    executor = Executor(params, config, RUN, mesh)
    return lambda: Engine(executor, config, RUN)


@pytest.fixture(scope="module")
def unhurried(plain):
    """The text of a request without speculation, found once."""
    texts = {}

    def text(prompt, params):
        key = (tuple(prompt), repr(params))
        if key not in texts:
            texts[key] = alone(plain(), prompt, params)
        return texts[key]

    return text


def other_weights(params):
    """The weights of a model that says something else: the embeddings go to other tokens."""
    return {**params, "head": jnp.roll(params["head"], 1, axis=0)}


@pytest.fixture(scope="module")
def executors(parts):
    """The executor of an n-gram drafter, and that of a model's, made when first asked for."""
    params, config, mesh = parts
    made = {}

    def executor(name):
        if name not in made:
            drafter = NgramDrafter()
            if name == "model":
                drafter = ModelDrafter(replicate(params, mesh), config, RUN.dtype, "reference")
            run = replace(RUN, drafter=name, **DRAFTED[name])
            made[name] = Executor(params, config, run, mesh, drafter=drafter)
        return made[name]

    return executor


@pytest.fixture(scope="module", params=["ngram", "itself", "another"])
def drafted(request, executors, parts):
    """(kind, executor, config): it looks up, is always right, or always wrong."""
    params, _, mesh = parts
    kind = request.param
    executor = executors("ngram" if kind == "ngram" else "model")
    if kind == "another":
        executor.drafter.params = replicate(other_weights(params), mesh)
    return kind, executor, executor.decode_config


@pytest.fixture
def engine(drafted, parts):
    _, executor, run = drafted
    return Engine(executor, parts[1], run)


def counts(engine, prompt, params):
    """Tokens of each step of a request that is alone."""
    return [len(delta.token_ids) for delta in engine.stream(prompt, params)]


def test_acceptance(drafted, engine):
    """A model that drafts for itself is right each time, one that says another thing never."""
    kind, *_ = drafted
    found = counts(engine, prompt_of(9), replace_params(GREEDY, max_tokens=22))
    if kind == "itself":
        # The first comes with the prompt, the second with the step that has no drafts yet.
        assert found == [1, 1, 3, 3, 3, 3, 3, 3, 2]
    elif kind == "another":
        assert found == [1] * 22
    assert counts(engine, prompt_of(9), SEEDED)[2:4] == {"itself": [3, 3]}.get(kind, [1, 1])


REQUESTS = {
    "greedy": (prompt_of(9), replace_params(GREEDY, max_tokens=24)),
    "short": ([7], replace_params(GREEDY, max_tokens=5)),
    "looping": ([3, 4, 5] * 6, replace_params(GREEDY, max_tokens=30)),
    "seeded": (prompt_of(17), SEEDED),
    "penalized": (prompt_of(6), PENALIZED),
    "few": (prompt_of(20), replace_params(GREEDY, max_tokens=2)),
}


def test_the_text_is_the_same_alone(engine, unhurried):
    for name in ("looping", "seeded", "short"):
        assert alone(engine, *REQUESTS[name]) == unhurried(*REQUESTS[name]), name


def test_the_text_is_the_same_in_company(engine, unhurried):
    """More requests than slots."""
    texts = serve(engine, REQUESTS, joins=[0, 2, 3, 0, 5, 7])
    assert texts == {name: unhurried(*request) for name, request in REQUESTS.items()}


def test_aborted_and_preempted(drafted, parts, unhurried):
    """Pages run out, and a request goes in the middle; what comes back drafts as before."""
    _, executor, run = drafted
    small = Engine(FewPages(executor, 14), parts[1], run)
    requests = {
        "greedy": (prompt_of(20), replace_params(GREEDY, max_tokens=30)),
        "penalized": (prompt_of(13), replace_params(PENALIZED, max_tokens=40)),
        "seeded": (prompt_of(11), replace_params(SEEDED, max_tokens=40)),
        "gone": (prompt_of(5), replace_params(GREEDY, max_tokens=40)),
    }
    texts = serve(small, requests, aborts=[(7, "gone")])
    assert small.stats().preemptions > 0
    for name, request in requests.items():
        expected = unhurried(*request)
        assert texts[name] == (expected if name != "gone" else expected[: len(texts[name])])


@pytest.fixture(scope="module")
def answers(plain):
    """The deltas without speculation, found once."""
    found = {}

    def deltas(prompt, params):
        key = repr((prompt, params))
        found[key] = found.get(key) or list(plain().stream(prompt, params))
        return found[key]

    return deltas


def test_stop_token_and_logprobs_inside_an_accepted_run(engine, unhurried, answers):
    """What comes behind a stop token in a step is dropped; each token has its own logprob."""
    prompt = prompt_of(9)
    text = unhurried(prompt, replace_params(GREEDY, max_tokens=16))
    for place in (7, 9):
        stop = text[place]
        end = text.index(stop)
        params = replace_params(GREEDY, max_tokens=16, stop_token_ids=[stop], logprobs=2)
        deltas = [list(engine.stream(prompt, params)), answers(prompt, params)]
        assert [d[-1].stop_token for d in deltas] == [stop, stop]
        assert [d[-1].completion_tokens for d in deltas] == [end + 1, end + 1]
        found, expected = ([e for d in part for e in d.logprobs] for part in deltas)
        assert [entry.token_id for entry in found] == text[:end]
        for entry, other in zip(found, expected, strict=True):
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]


def test_up_to_the_end_of_the_context(engine, unhurried):
    """All four requests to the last token that the pages hold."""
    requests = {str(n): (prompt_of(70 + n), SamplingParams(temperature=0.0, ignore_eos=True))
                for n in range(4)}  # fmt: skip
    texts = serve(engine, requests)
    for name, (prompt, params) in requests.items():
        assert len(texts[name]) == 96 - len(prompt)
        assert texts[name] == unhurried(prompt, params)


def test_a_reused_slot_brings_no_old_drafts(drafted, engine):
    """What the slot's last tenant said is not looked up, nor is its draft model's state read."""
    _, executor, _ = drafted
    prompt, params = prompt_of(9), replace_params(GREEDY, max_tokens=22)
    before = counts(engine, prompt, params)
    serve(engine, REQUESTS)
    poisoned = jax.tree.map(
        lambda leaf: (
            jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        executor.cache.draft,
    )
    history = jnp.full_like(executor.cache.slots.history, 5)
    slots = replace(executor.cache.slots, history=history)
    executor.cache = replace(executor.cache, draft=poisoned, slots=slots)
    assert counts(engine, prompt, params) == before


def test_a_draft_model_is_whole_on_each_of_two_ranks(path, unhurried):
    """The model is split, its twin is not: the same text, and every draft is right."""
    config, mesh = K3Config.from_file(path), make_mesh(2)
    run = replace(
        RUN,
        tp=2,
        max_requests=1,
        num_spec=2,
        drafter=str(path),
        builds=((3, 1),),
        prefill_buckets=((1, 16),),
    )
    drafter = make_drafter(run, config, mesh)
    executor = Executor(load_params(path, config, mesh), config, run, mesh, drafter=drafter)
    prompt, params = prompt_of(9), replace_params(GREEDY, max_tokens=22)
    deltas = [delta.token_ids for delta in Engine(executor, config, run).stream(prompt, params)]
    assert [len(tokens) for tokens in deltas] == [1, 1, 3, 3, 3, 3, 3, 3, 2]
    assert [token for tokens in deltas for token in tokens] == unhurried(prompt, params)
    for leaf in jax.tree.leaves(executor.cache.draft):
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert first.tobytes() == second.tobytes()


@pytest.mark.gpu
def test_layer_kernels_verify_what_a_draft_model_says(path, parts):
    """The recorded text, three tokens a step: both models run on compiled kernels."""
    params, config, mesh = parts
    run = replace(
        RUN,
        max_requests=1,
        num_spec=2,
        drafter=str(path),
        builds=((3, 1),),
        prefill_buckets=((1, 32),),
    )
    drafter = make_drafter(run, config, mesh)
    engine = Engine(Executor(params, config, run, mesh, drafter=drafter), config, run)
    with np.load(path / "golden.npz") as arrays:
        prompt, wanted = arrays["seq1.input_ids"].tolist(), arrays["seq1.greedy"].tolist()
    deltas = list(engine.stream(prompt, replace_params(GREEDY, max_tokens=24)))
    assert [token for delta in deltas for token in delta.token_ids] == wanted
    assert [len(delta.token_ids) for delta in deltas] == [1, 1] + [3] * 7 + [1]
    assert engine.executor.specialized.steps


def test_the_memory_for_caches_holds_the_draft_models_too(executors, monkeypatch):
    executor = executors("model")

    def size(sizes):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(executor.make_cache(sizes)))

    sizes, run = replace(executor.sizes, prefix=NOTHING_KEPT), executor.decode_config
    sizes = replace(sizes, pages=1 + run.max_requests * run.max_pages)
    fewer = replace(sizes, pages=sizes.pages - 3)
    page = (size(sizes) - size(fewer)) // 3
    memory = replace(run, cache_memory=size(fewer) + page - 1, prefix_cache=0)
    monkeypatch.setattr(executor, "decode_config", memory)
    assert executor._choose_sizes() == fewer


def test_look_up():
    history = np.zeros((7, 16), np.int32)
    rows = [
        [1, 2, 3, 9, 1, 2, 3],  # 9 followed 1, 2, 3
        [5, 6, 7, 8],  # nothing stood before
        [4, 4],  # once is enough, and it repeats
        [2, 8, 1, 2, 7, 2],  # of equals the latest
        [1, 2, 3, 4, 5, 3, 6, 1, 2, 3],  # the longer match comes before the latest
        [3],
        [],
    ]
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = tokens
        history[row, len(tokens) :] = 3  # of an earlier tenant
    known = np.array([len(tokens) for tokens in rows], np.int32)
    assert look_up(jnp.asarray(history), jnp.asarray(known), 3).tolist() == [
        [9, 1, 2],
        [-1, -1, -1],
        [4, 4, 4],
        [7, 2, 7],
        [4, 5, 3],
        [-1, -1, -1],
        [-1, -1, -1],
    ]


def test_refusals(parts, golden):
    params, config, mesh = parts
    with pytest.raises(ValueError, match="drafter ngram needs num_spec"):
        replace(RUN, drafter="ngram")
    with pytest.raises(ValueError, match="drafter ngram, but none was given"):
        Executor(params, config, replace(RUN, drafter="ngram", **DRAFTED["ngram"]), mesh)
    linear = golden / "kimi-linear-tiny"
    with pytest.raises(ValueError, match=r"vocabulary of 192 .*: give one that was made for it"):
        make_drafter(replace(RUN, drafter=str(linear), **DRAFTED["model"]), config, mesh)
