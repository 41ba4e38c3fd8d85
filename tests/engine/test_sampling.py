"""The sampler: distribution, independence of company, penalties against numpy, acceptance."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from k3jax import sampling
from k3jax.request import SamplingParams
from k3jax.sampling import (
    make_sampling_state,
    observe,
    prompt_logprobs,
    reset_slot,
    sample,
    sampling_row,
)

VOCAB = 48
SLOTS = 6
_compiled = jax.jit(sample)
_observe = jax.jit(observe)


def _sample(logits, state, slots, drafts, positions, bitmask=None):
    """`sample` padded with null requests and rows without a draft to one compiled shape."""
    batch, rows, _ = logits.shape
    more = ((0, 4 - batch), (0, 5 - rows))
    drafts = np.full((batch, rows - 1), -1, np.int32) if drafts is None else drafts
    result = _compiled(
        np.pad(logits, (*more, (0, 0))),
        state,
        np.pad(slots, more[:1]),
        np.pad(drafts, more, constant_values=-1),
        np.pad(positions, more),
        None if bitmask is None else np.pad(bitmask, (*more, (0, 0))),
    )
    return jax.tree.map(lambda x: x[:batch] if x.ndim == 1 else x[:batch, :rows], result)


@functools.cache
def _empty():
    return make_sampling_state(SLOTS, VOCAB)


def state_of(*requests, stop_ids=(), prompt_length=0):
    """A state with the given SamplingParams in slots 1, 2, ..."""
    state = _empty()
    for slot, params in enumerate(requests, start=1):
        row = sampling_row(params, stop_ids, prompt_length, params.seed or 0)
        state = reset_slot(state, jnp.int32(slot), row)
    return state


def logits_of(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*shape, VOCAB)).astype(np.float32) * 2


def draw(logits, params, positions, **kwargs):
    """The tokens that one request gives at each of `positions` for the same logits[V]."""
    state = state_of(params, **kwargs)
    wide = np.broadcast_to(logits, (1, len(positions), VOCAB))
    return np.asarray(_compiled(wide, state, np.int32([1]), None, positions[None]).tokens[0])


def expected_distribution(logits, params):
    """float64 [V]: min_p, top_k and top_p on a sorted list, by hand."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    mass = np.cumsum(weights[order]) / weights.sum()
    kept = int(np.searchsorted(mass, params.top_p)) + 1
    if params.top_p < 1:
        weights[order[kept:]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.6),
        SamplingParams(seed=3, top_p=0.8),
        SamplingParams(seed=4, top_k=5, temperature=1.5),
        SamplingParams(seed=5, min_p=0.1),
        SamplingParams(seed=6, top_k=20, top_p=0.7, min_p=0.02, temperature=1.3),
    ],
    ids=["plain", "cold", "top_p", "top_k", "min_p", "all"],
)
def test_draws_follow_the_distribution(params):
    """20,000 draws at 20,000 positions pass a chi-square test, and nothing cut off is drawn."""
    logits = logits_of(params.seed, 1)[0]
    expected = expected_distribution(logits, params)
    tokens = np.concatenate(
        [
            draw(logits, params, np.arange(n, n + 2000, dtype=np.int32))
            for n in range(0, 20000, 2000)
        ]
    )
    observed = np.bincount(tokens, minlength=VOCAB)
    assert (observed[expected == 0] == 0).all()
    common = expected * len(tokens) >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum()) * len(tokens)
    present = expected > 0
    statistic = ((observed - expected)[present] ** 2 / expected[present]).sum()
    assert stats.chi2.sf(statistic, present.sum() - 1) > 1e-3


def test_same_seed_same_token_in_any_company():
    """A seeded row gives one token alone, in any batch position, and beside other wishes."""
    logits = logits_of(7, 4, 3)
    me = SamplingParams(seed=2**40 + 11, top_p=0.9)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=5, top_k=3, repetition_penalty=1.5, logprobs=4),
        SamplingParams(seed=9, logit_bias={4: 50.0}),
    ]
    positions = np.int32([[10, 11, 12]])
    alone = _compiled(logits[:1], state_of(me), np.int32([1]), None, positions).tokens[0]
    state = state_of(*others, me)
    for place in range(4):
        slots = np.int32([1, 2, 3])
        slots = np.insert(slots, place, 4)
        batch = np.insert(logits[1:], place, logits[0], axis=0)
        everyone = np.broadcast_to(positions, (4, 3)).copy()
        company = _sample(batch, state, slots, None, everyone).tokens[place]
        np.testing.assert_array_equal(company, alone)


def test_a_row_of_a_verify_step_is_the_row_of_a_plain_step():
    """Speculation keeps the distribution: the token of a row is the same with one row or many."""
    logits = logits_of(8, 1, 5)
    params = SamplingParams(seed=3, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.95)
    state = state_of(params)
    plain = []
    history = state
    for row in range(5):
        result = _sample(logits[:, row : row + 1], history, np.int32([1]), None, np.int32([[row]]))
        plain.append(int(result.tokens[0, 0]))
        yes = np.ones((1, 1), bool)
        history = _observe(history, np.int32([1]), result.tokens, yes, yes)
    drafts = np.int32([plain[:4]])
    rows = np.arange(5, dtype=np.int32)[None]
    verified = _sample(logits, state, np.int32([1]), drafts, rows)
    assert verified.tokens[0].tolist() == plain
    assert int(verified.count[0]) == 5


@pytest.mark.parametrize(
    ("wrong", "count"), [((), 4), ((0,), 1), ((1,), 2), ((2,), 3), ((0, 1, 2), 1)]
)
def test_acceptance(wrong, count):
    """A draft counts if it and all before it equal the sampled tokens; -1 is never accepted."""
    logits = logits_of(9, 1, 4)
    best = logits[0].argmax(-1)
    for bad in ("other", "none"):
        drafts = best[:3].astype(np.int32)
        for index in wrong:
            drafts[index] = -1 if bad == "none" else (best[index] + 1) % VOCAB
        result = _sample(
            logits,
            state_of(SamplingParams(temperature=0.0)),
            np.int32([1]),
            drafts[None],
            np.arange(4, dtype=np.int32)[None],
        )
        assert int(result.count[0]) == count
        assert result.tokens[0].tolist() == best.tolist()


def test_speculation_keeps_the_distribution():
    """Pairs of tokens of a Markov chain, the second from the same step where its draft was right.

    20,000 seeds, each its own request; whether a draft is accepted depends on the very noise that
    picked the token, so the second token might lean, were its own noise not another.
    """
    seeds, vocab = 20_000, 6
    table = np.random.default_rng(3).normal(size=(vocab, vocab)).astype(np.float32)
    state = make_sampling_state(seeds, vocab)
    rows = replace(
        state.rows,
        temperature=jnp.full(seeds, 0.8, jnp.float32),
        seed=jnp.arange(seeds, dtype=jnp.uint32),
    )
    state = replace(state, rows=rows)
    slots = np.arange(seeds, dtype=np.int32)
    step = jax.jit(sample)

    def verify(tokens, drafts, position):
        logits = table[np.stack([tokens, drafts], axis=1)]
        positions = np.broadcast_to(np.int32([position, position + 1]), (seeds, 2))
        found = step(logits, state, slots, drafts[:, None], positions)
        return np.asarray(found.tokens), np.asarray(found.count)

    drafts = np.random.default_rng(4).integers(0, vocab, seeds, np.int32)
    tokens, count = verify(np.zeros(seeds, np.int32), drafts, 7)
    first, accepted = tokens[:, 0], count == 2
    later, _ = verify(first, drafts, 8)
    second = np.where(accepted, tokens[:, 1], later[:, 0])
    assert 0.1 < accepted.mean() < 0.25
    assert (tokens[accepted, 1] == later[accepted, 0]).all()
    weights = np.exp(table / np.float32(0.8))
    chain = weights / weights.sum(axis=1, keepdims=True)
    expected = (chain[0][:, None] * chain).reshape(-1) * seeds
    seen = np.bincount(first * vocab + second, minlength=vocab * vocab)
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, vocab * vocab - 1) > 1e-3


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.zeros((1, 1, VOCAB), np.float32)
    logits[0, 0, [7, 11, 30]] = 3.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1, temperature=1e-30)):
        result = _sample(logits, state_of(params), np.int32([1]), None, np.int32([[0]]))
        allowed = [7] if params.temperature == 0 else [7, 11, 30]
        assert int(result.tokens[0, 0]) in allowed


def penalized(logits, params, prompt, generated):
    """Numpy oracle of the three penalties and the bias for one row."""
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(generated):
        factor = params.repetition_penalty
        out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
    for token in set(generated):
        out[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


def test_penalties_against_numpy():
    """Twelve greedy rows of a request with every penalty, drafts included, match the oracle."""
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={3: 1.5, 9: -2.0},
    )
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCAB, 9).tolist()
    generated = rng.integers(0, VOCAB, 14).tolist()
    drafts = rng.integers(0, VOCAB, 3).tolist()
    drafts[2] = drafts[0]
    slots = np.int32([2, 0])
    tokens = np.int32([prompt + generated, [1] * 23])
    made = np.arange(23) >= len(prompt)
    state = _observe(
        state_of(SamplingParams(), params),
        slots,
        tokens,
        np.ones((2, 23), bool),
        np.broadcast_to(made, (2, 23)).copy(),
    )
    assert int(state.counts[0].sum()) == 0
    assert not bool(state.seen[0].any())
    for seed in range(3):
        logits = logits_of(20 + seed, 2, 4)
        rows = np.tile(np.arange(4, dtype=np.int32), (2, 1))
        result = _sample(logits, state, slots, np.int32([drafts, [-1] * 3]), rows)
        for row in range(4):
            expected = penalized(logits[0, row], params, prompt, generated + drafts[:row])
            assert int(result.tokens[0, row]) == int(expected.argmax())


def test_observe_skips_what_is_not_valid():
    state = state_of(SamplingParams())
    tokens = np.int32([[4, 4, 6, -1]])
    valid = np.array([[True, True, False, False]])
    state = _observe(state, np.int32([1]), tokens, valid, np.ones((1, 4), bool))
    assert int(state.counts[1, 4]) == 2
    assert int(state.counts.sum()) == 2
    assert np.flatnonzero(np.asarray(state.seen[1])).tolist() == [4]


def test_min_tokens_bans_the_stop_ids_only_before_that():
    """The stop token comes at position prompt + min_tokens and not one earlier."""
    logits = np.zeros((1, 4, VOCAB), np.float32)
    logits[..., 5] = 9.0
    logits[..., 6] = 8.0
    state = state_of(
        SamplingParams(temperature=0.0, min_tokens=2), stop_ids=[5, 40], prompt_length=10
    )
    positions = np.int32([[9, 10, 11, 12]])  # give the tokens at 10, 11, 12, 13
    result = _sample(logits, state, np.int32([1]), None, positions)
    assert result.tokens[0].tolist() == [6, 6, 5, 5]


def test_bitmask_allows_only_its_tokens():
    logits = logits_of(11, 1, 2)
    mask = np.zeros((1, 2, (VOCAB + 31) // 32), np.uint32)
    mask[0, 0, 1] = 1 << 3  # token 35
    mask[0, 1, 0] = (1 << 31) | 1  # tokens 31 and 0
    result = _sample(
        logits,
        state_of(SamplingParams(seed=1)),
        np.int32([1]),
        None,
        np.int32([[0, 1]]),
        mask,
    )
    assert int(result.tokens[0, 0]) == 35
    assert int(result.tokens[0, 1]) in (0, 31)


def test_logprobs_are_those_of_the_raw_logits():
    """Temperature and penalties leave the reported log probabilities alone."""
    logits = logits_of(12, 2, 3)
    params = SamplingParams(seed=1, temperature=0.3, logprobs=20, logit_bias={4: 100.0})
    state = state_of(params, SamplingParams(temperature=0.0))
    rows = np.tile(np.arange(3, dtype=np.int32), (2, 1))
    result = _sample(logits, state, np.int32([1, 2]), None, rows)
    oracle = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(result.logprobs[0], oracle[0, :, 4], rtol=1e-6)
    order = np.argsort(-oracle, axis=-1, kind="stable")[..., :20]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(oracle, order, axis=-1), rtol=1e-5
    )
    values, _, _ = prompt_logprobs(logits, np.int32([[1, 2, -1], [3, 4, 5]]))
    np.testing.assert_allclose(values[1], oracle[1, [0, 1, 2], [3, 4, 5]], rtol=1e-5)


@pytest.mark.parametrize("vocab", [20, 128, 2560, 2561, 7000])
def test_the_likeliest_tokens_are_those_of_a_sort(vocab):
    """Of equal logits, of which there are many here, the lower id comes first."""
    logits = np.random.default_rng(vocab).integers(-9, 9, (2, 3, vocab)).astype(np.float32)
    logits[0, 0, vocab // 2 :] = 9
    expected, ids = jax.lax.top_k(logits, 20)
    values, found = sampling._likeliest(jnp.asarray(logits), 20)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(values, expected)


def test_gpus_sample_the_same_without_conditions(monkeypatch):
    """They compute what nobody wants as well; a CPU asks first."""
    logits = logits_of(31, 4, 3)
    wishes = (
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(seed=5, top_k=9, repetition_penalty=1.5, logprobs=4, min_tokens=20),
        SamplingParams(seed=9, logit_bias={4: 50.0}, min_p=0.05),
        SamplingParams(seed=3, top_p=0.8),
    )
    slots = np.int32([1, 2, 3, 4])
    positions = np.tile(np.arange(10, 13, dtype=np.int32), (4, 1))
    drafts = np.full((4, 2), 7, np.int32)

    def gpu(*operands, cpu, default):
        return default(*operands)

    for wanted in (wishes, wishes[:1] * 4, (SamplingParams(temperature=0.0),) * 4):
        state = state_of(*wanted, stop_ids=(3, 7))
        arguments = (logits, state, slots, drafts, positions)
        expected = jax.jit(lambda *args: sample(*args))(*arguments)
        with monkeypatch.context() as patched:
            patched.setattr(sampling.lax, "platform_dependent", gpu)
            actual = jax.jit(lambda *args: sample(*args))(*arguments)
        assert set(np.asarray(expected.tokens).reshape(-1)) != {0}
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(poison):
    """The poisoned request gives token 0 and its flag; the others are as without it."""
    logits = logits_of(13, 3, 2)
    requests = [SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5), SamplingParams(seed=3)]
    state = state_of(*requests)
    rows = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    slots = np.int32([1, 2, 3])
    drafts = np.full((3, 1), -1, np.int32)
    clean = _sample(logits, state, slots, drafts, rows)
    logits[1, 0, 5] = poison
    dirty = _sample(logits, state, slots, drafts, rows)
    assert dirty.nonfinite.tolist() == [False, True, False]
    assert int(dirty.tokens[1, 0]) == 0
    for row in (0, 2):
        np.testing.assert_array_equal(dirty.tokens[row], clean.tokens[row])
    slots[1] = 0
    assert not bool(_sample(logits, state, slots, drafts, rows).nonfinite.any())


def test_a_rejected_row_that_is_not_finite_does_not_count():
    logits = logits_of(14, 1, 2)
    logits[0, 1] = np.nan
    rows = np.int32([[0, 1]])
    state = state_of(SamplingParams(temperature=0.0))
    wrong = np.int32([[(logits[0, 0].argmax() + 1) % VOCAB]])
    right = np.int32([[logits[0, 0].argmax()]])
    assert not bool(_sample(logits, state, np.int32([1]), wrong, rows).nonfinite[0])
    assert bool(_sample(logits, state, np.int32([1]), right, rows).nonfinite[0])
