"""Caches, slots and speculation: however a text is computed, it is the same text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.cache import cache_specs
from k3jax.decode.batch import Step
from k3jax.decode.step import forward
from k3jax.parallel import REPLICATED, spmd
from k3jax.params import packed_specs
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


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_greedy_text_whatever_the_chunks(k3, seq1, chunk):
    prompt, wanted = seq1
    assert k3.greedy(1, prompt, 24, chunk=chunk) == wanted


def test_kimi_linear_greedy(linear, numbers):
    arrays = numbers["kimi-linear-tiny"]
    assert linear.greedy(2, arrays["seq0.input_ids"], 32) == arrays["seq0.greedy"].tolist()


@pytest.mark.parametrize("chunk", [7, 64])
def test_caches_after_prefill(k3, numbers, close, chunk):
    arrays = numbers["k3-tiny-a"]
    prompt = arrays["seq1.input_ids"]
    k3.prefill(3, prompt, chunk=chunk)
    cache = k3.executor.cache
    kda, mla = cache.layers[1], cache.layers[3]
    close(np.asarray(kda.conv[3]), arrays["seq1.L1.conv_state_mlx"])
    close(np.asarray(kda.state[3]).swapaxes(1, 2), arrays["seq1.L1.ssm_state_mlx"])
    pages = np.asarray(cache.slots.pages[3])
    latents = np.asarray(mla.latents[pages]).reshape(-1, mla.latents.shape[-1])[: len(prompt)]
    close(latents[:, :32], arrays["seq1.L3.kv_latent_mlx"])
    close(latents[:, 32:], arrays["seq1.L3.k_rope_mlx"])


def decode_logits(executor):
    """A decode step that takes its token from the host and gives logits instead of a sample."""
    step = Step("decode", 1, 1)

    def run(params, cache, batch, token):
        slots = cache.slots
        cache = replace(cache, slots=replace(slots, token=slots.token.at[batch.slots].set(token)))
        decoder = nnx.merge(executor.graph, params)
        inputs = (cache, batch)
        done = forward(decoder, executor.config, executor.decode_config, step, inputs)
        length = done.slots.length.at[batch.slots].add(1)
        accepted = done.slots.accepted.at[batch.slots].set(1)
        slots = replace(done.slots, length=length, accepted=accepted)
        return replace(cache, layers=done.layers, slots=slots), decoder.logits(done.residual)

    specs = cache_specs(executor.config)
    in_specs = (packed_specs(executor.config), specs, REPLICATED, REPLICATED)
    return step, jax.jit(spmd(run, executor.mesh, in_specs, (specs, REPLICATED)))


def test_cached_decode_equals_the_full_forward(k3, numbers, close):
    arrays = numbers["k3-tiny-a"]
    ids, executor = arrays["seq0.input_ids"], k3.executor
    step, run = decode_logits(executor)
    k3.prefill(2, ids[:32])
    found = []
    for position in range(32, 48):
        batch = executor.empty_batch(step)
        batch.slots[0] = 2
        batch.page_updates[:1] = k3.updates(2, position, position + 1)
        executor.cache, logits = run(executor.params, executor.cache, batch, ids[position])
        found.append(np.asarray(logits[0]))
    close(np.stack(found), arrays["seq0.logits"][32:])
    close(np.stack(found), arrays["seq0.decode_logits_mlx"])


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "none"])
def test_drafts_never_change_the_text(k3, seq1, rows, kind):
    prompt, wanted = seq1
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
    tokens = k3.prefill(1, prompt).tokens[0].tolist()
    for rows in (4, 1, 2, 1, 4, 2):
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
        assert k3.greedy(1, prompt, 24, chunk=7, pad=unused) == wanted
        output = k3.prefill(2, [*prompt[:5], unused])
        assert output.nonfinite.tolist() == [True, False]
    finally:
        executor.params = clean
    assert k3.greedy(2, prompt, 24) == wanted  # the slot and the pages of the failed one


def test_a_one_token_prompt_starts_from_zero(k3, seq1):
    prompt, _ = seq1
    poison(k3.executor)
    once = k3.greedy(1, prompt[:1], 5)
    assert k3.greedy(1, prompt[:1], 5) == once


def test_prompt_logprobs_and_counts(k3, numbers, seq1):
    prompt, wanted = seq1
    logits = numbers["k3-tiny-a"]["seq1.logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    params = SamplingParams(temperature=0.0, prompt_logprobs=5, logprobs=2)
    k3.admit(1, prompt, params)
    found, top, top_ids = [], [], []
    for start in range(0, 23, 7):
        end = min(start + 7, 23)
        following = {1: prompt[end] if end < 23 else -1}
        output = k3.chunk({1: prompt[start:end]}, final=end == 23, following=following)
        found.append(output.prompt_logprobs[0, : end - start])
        top.append(output.prompt_top_logprobs[0, : end - start])
        top_ids.append(output.prompt_top_ids[0, : end - start])
    own = np.take_along_axis(logprobs[:-1], prompt[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(np.concatenate(found)[:-1], own, atol=3e-4)
    ids = np.concatenate(top_ids)
    assert (ids[:, 0] == logprobs.argmax(axis=1)).all()
    np.testing.assert_allclose(
        np.concatenate(top), np.take_along_axis(logprobs, ids, axis=1), atol=3e-4
    )
    np.testing.assert_allclose(output.logprobs[0, 0], logprobs[-1].max(), atol=3e-4)
    k3.decode([1])
    sampling = k3.executor.cache.slots.sampling
    assert np.flatnonzero(np.asarray(sampling.counts[1])).tolist() == sorted(set(wanted[:2]))
    assert set(np.flatnonzero(np.asarray(sampling.seen[1]))) == {*prompt.tolist(), *wanted[:2]}
    assert not np.asarray(sampling.seen[0]).any()


def test_nothing_compiles_after_warm_up(k3, seq1):
    compiled = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        prompt, wanted = seq1
        assert k3.greedy(1, prompt, 8, chunk=7) == wanted[:8]
        assert k3.greedy(2, prompt, 8, rows=4, drafter=lambda tokens: [1, 2, 3]) == wanted[:8]
        assert not compiled
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert k3.executor.compilations == len(k3.executor.steps) + 1
