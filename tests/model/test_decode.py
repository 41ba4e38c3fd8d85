"""Caches, slots and speculation: however a text is computed, it is the same text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driving import CHUNK

from k3jax.request import SamplingParams


@pytest.fixture
def seq1(numbers):
    arrays = numbers["k3-tiny-a"]
    return arrays["seq1.input_ids"], arrays["seq1.greedy"].tolist()


def poison(executor):
    """NaN in every float of the cache, the null slot and the null page included."""
    executor.cache = jax.tree.map(
        lambda leaf: (
            jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        executor.cache,
    )


@pytest.mark.parametrize("chunks", [(1,), (7,), (16,), (64,)])
def test_greedy_text_whatever_the_chunks(k3, seq1, chunks):
    prompt, wanted = seq1
    assert k3.greedy(1, prompt, 24, chunks=chunks) == wanted


def test_kimi_linear_greedy(linear, numbers):
    arrays = numbers["kimi-linear-tiny"]
    assert linear.greedy(2, arrays["seq0.input_ids"], 32) == arrays["seq0.greedy"].tolist()


@pytest.mark.parametrize("chunks", [(1, 7), (64,)])
def test_caches_after_prefill(k3, numbers, close, chunks):
    arrays = numbers["k3-tiny-a"]
    prompt = arrays["seq1.input_ids"]
    k3.prefill(3, prompt, chunks=chunks)
    cache = k3.executor.cache
    kda, mla = cache.layers[1], cache.layers[3]
    ring = np.asarray(kda.conv[3])
    window = ring[np.arange(len(prompt) - 3, len(prompt)) % len(ring)]
    close(window, arrays["seq1.L1.conv_state_mlx"])
    close(np.asarray(kda.state[3]), arrays["seq1.L1.ssm_state_mlx"])
    pages = np.asarray(cache.slots.pages[3])
    latents = np.asarray(mla.latents[pages]).reshape(-1, mla.latents.shape[-1])[: len(prompt)]
    close(latents[:, :32], arrays["seq1.L3.kv_latent_mlx"])
    close(latents[:, 32:], arrays["seq1.L3.k_rope_mlx"])


def test_cached_decode_equals_the_full_forward(k3, numbers):
    """One-token steps on recorded tokens; their normalization speaks for logits beyond the top."""
    arrays, executor = numbers["k3-tiny-a"], k3.executor
    ids, top_ids, top = arrays["seq0.input_ids"], [], []
    k3.prefill(2, ids[:32], params=SamplingParams(temperature=0.0, logprobs=20))
    for position in range(32, 48):
        token = np.array(executor.cache.slots.token)
        token[2] = ids[position]
        token = jax.device_put(token, executor.cache.slots.token.sharding)
        executor.cache = replace(executor.cache, slots=replace(executor.cache.slots, token=token))
        _, output = k3.decode([2])
        top_ids.append(output.top_ids[0, 0])
        top.append(output.top_logprobs[0, 0])
    for name, rows in (("seq0.logits", slice(32, 48)), ("seq0.decode_logits_mlx", slice(16))):
        wanted = log_softmax(arrays[name][rows])
        assert (np.array(top_ids)[:, 0] == wanted.argmax(axis=1)).all()
        found = np.take_along_axis(wanted, np.array(top_ids), axis=1)
        np.testing.assert_allclose(np.array(top), found, atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "none"])
def test_drafts_never_change_the_text(k3, seq1, kind):
    prompt, wanted = seq1
    rows = 4
    steps = []

    def drafter(tokens):
        steps.append(len(tokens))
        ahead = (wanted + [0] * rows)[len(tokens) : len(tokens) + rows - 1]
        wrong = [(token + 1) % 512 for token in ahead]
        if kind == "mixed":  # the first draft is right, the others in turns
            return [
                ahead[i] if (i + len(steps)) % 2 or i == 0 else wrong[i] for i in range(rows - 1)
            ]
        return {"right": ahead, "wrong": wrong, "none": [-1] * (rows - 1)}[kind]

    assert k3.greedy(4, prompt, 24, drafter=drafter, rows=rows) == wanted
    if kind == "right":
        assert len(steps) == -(-23 // rows)
    if kind in ("wrong", "none"):
        assert len(steps) == 23


def test_steps_of_any_kind_follow_one_another(k3, seq1):
    prompt, wanted = seq1
    tokens = k3.prefill(1, prompt)[-1].tokens[0].tolist()
    for rows in (4, 1, 4, 1):
        ahead = wanted[len(tokens) : len(tokens) + rows - 1]
        drafts = {1: [*ahead[:-1], 3]} if rows > 1 else None  # the last one is wrong
        tokens += k3.decode([1], rows, drafts)[0][1]
    # A turn that goes on: the pending rows are committed by a prefill, the last token with it.
    k3.chunk({1: tokens[-1:]}, final=False)
    following = k3.chunk({1: wanted[len(tokens) : len(tokens) + 2]}, final=True)
    assert following.tokens[0, 0] == wanted[len(tokens) + 2]
    assert tokens == wanted[: len(tokens)]


def test_company_and_poison_do_not_leak(k3, numbers, seq1):
    """Two requests in reused, poisoned slots, with null rows beside them."""
    prompt, wanted = seq1
    other = numbers["k3-tiny-a"]["seq0.input_ids"]
    alone = k3.greedy(2, other, 10)
    poison(k3.executor)
    for slot, ids in ((3, prompt), (2, other)):
        k3.admit(slot, ids)
    first = k3.chunk({3: prompt[:20], 2: other[:40]}, final=False)
    assert not first.count.any()
    assert not first.nonfinite.any()
    output = k3.chunk({3: prompt[20:], 2: other[40:]}, final=True)
    tokens = {3: [output.tokens[0, 0]], 2: [output.tokens[1, 0]]}
    for _ in range(9):
        emitted, output = k3.decode([2, 3])
        assert not output.nonfinite.any()
        for slot, found in emitted.items():
            tokens[slot] += found
    assert tokens[3] == wanted[:10]
    assert tokens[2] == alone


def test_nan_in_padding_stays_there(k3, seq1):
    prompt, wanted = seq1
    executor = k3.executor
    clean = executor.params
    unused = next(token for token in range(512) if token not in {*prompt.tolist(), *wanted, 0})
    embed = np.array(clean["embed"])
    embed[unused] = np.nan
    executor.params = {**clean, "embed": jax.device_put(embed, clean["embed"].sharding)}
    try:
        assert k3.greedy(1, prompt, 24, chunks=(7,), pad=unused) == wanted
        output = k3.prefill(2, [*prompt[:5], unused])[-1]
        assert output.nonfinite.tolist() == [True, False]
    finally:
        executor.params = clean
    assert k3.greedy(2, prompt, 24) == wanted  # the slot and the pages of the failed one


def test_a_one_token_prompt_starts_from_zero(k3, seq1):
    prompt, _ = seq1
    poison(k3.executor)
    once = k3.greedy(1, prompt[:1], 5)
    assert k3.greedy(1, prompt[:1], 5) == once


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def scores(outputs, length):
    """Prompt log probabilities of all chunks, as one: own [T], ids [T, 20], their own [T, 20]."""
    names = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")
    rows = [CHUNK] * (len(outputs) - 1) + [length - CHUNK * (len(outputs) - 1)]
    parts = zip(outputs, rows, strict=True)
    parts = [[getattr(output, name)[0, :count] for name in names] for output, count in parts]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def test_prompt_logprobs_across_chunks(k3, numbers):
    arrays = numbers["k3-tiny-a"]
    prompt, positions = arrays["seq2.input_ids"], arrays["seq2.positions"]
    params = SamplingParams(temperature=0.0, prompt_logprobs=5)
    outputs = k3.prefill(1, prompt, params=params)
    own, ids, top = scores(outputs, len(prompt))
    wanted = log_softmax(arrays["seq2.logits"])
    assert (ids[positions, 0] == wanted.argmax(axis=1)).all()
    found = np.take_along_axis(wanted, ids[positions], axis=1)
    np.testing.assert_allclose(top[positions], found, atol=3e-4)
    inner = positions < len(prompt) - 1
    following = prompt[positions[inner] + 1]
    np.testing.assert_allclose(
        own[positions[inner]], wanted[inner, following], atol=3e-4
    )  # 63 and 127 are the last rows of their chunks
    assert {63, 127} & set(positions.tolist())


def test_what_was_met_is_counted(k3, numbers, seq1):
    prompt, wanted = seq1
    params = SamplingParams(temperature=0.0, logprobs=2)
    output = k3.prefill(1, prompt, params=params)[-1]
    logprobs = log_softmax(numbers["k3-tiny-a"]["seq1.logits"])
    np.testing.assert_allclose(output.logprobs[0, 0], logprobs[-1].max(), atol=3e-4)
    assert not output.prompt_logprobs.any()
    k3.decode([1], 4, {1: [wanted[1], 0, 0]})
    sampling = k3.executor.cache.slots.sampling
    counts = np.bincount(wanted[:3], minlength=512)
    assert (np.asarray(sampling.counts[1]) == counts).all()
    assert set(np.flatnonzero(np.asarray(sampling.seen[1]))) == {*prompt.tolist(), *wanted[:3]}
    assert not np.asarray(sampling.seen[0]).any()


def test_nothing_compiles_after_warm_up(k3, seq1):
    compiled = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        prompt, wanted = seq1
        assert k3.greedy(1, prompt, 8, chunks=(7,)) == wanted[:8]
        assert k3.greedy(2, prompt, 8, rows=4, drafter=lambda tokens: [1, 2, 3]) == wanted[:8]
        assert not compiled
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert k3.executor.compilations == len(k3.executor.steps) + 1
