"""Donation, sizing, refusals, and the seam between modules and packed parameters."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from driving import LINEAR_RUN, Driver

from k3jax.cache import MlaPages, commit, fixed_bytes, make_cache, page_bytes
from k3jax.config import K3Config
from k3jax.decode import executor as executor_module
from k3jax.decode.batch import Step
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor, check_params
from k3jax.model.decoder import abstract_decoder
from k3jax.params import packed_shapes, packed_specs


@pytest.mark.parametrize("model", ["k3-tiny-a", "kimi-linear-tiny"])
@pytest.mark.parametrize("tp", [1, 2])
def test_modules_declare_the_packed_tree(golden, model, tp):
    config = K3Config.from_file(golden / model)
    _, local = abstract_decoder(config, tp, "reference", "float32")

    def whole(shape, spec):
        split = [*spec, *[None] * (len(shape.shape) - len(spec))]
        sizes = zip(shape.shape, split, strict=True)
        return tuple(n if axis is None else n * tp for n, axis in sizes), shape.dtype

    wanted = packed_shapes(config, tp)
    assert jax.tree.map(whole, local, packed_specs(config)) == jax.tree.map(
        lambda shape: (shape.shape, shape.dtype), wanted
    )


def scenario(driver, arrays):
    """A slot that is used twice, beside another; everything the host and the caches see."""
    first, second = arrays["seq0.input_ids"], arrays["seq1.input_ids"]
    driver.prefill(1, first)
    seen = [driver.decode([1])[1] for _ in range(3)]
    driver.admit(1, second)
    driver.admit(2, first)
    seen.append(driver.chunk({1: second[:60], 2: first[:20]}, final=False))
    seen.append(driver.chunk({2: first[20:], 1: second[60:]}, final=True))
    seen += [driver.decode([2, 1])[1] for _ in range(3)]
    return jax.tree.leaves((seen, jax.tree.map(np.asarray, driver.executor.cache)))


def test_donation_changes_nothing(linear, numbers, monkeypatch):
    donating, executor = executor_module.build_step, linear.executor
    monkeypatch.setattr(
        executor_module,
        "build_step",
        lambda *args, **options: jax.jit(donating(*args, **options).__wrapped__),
    )
    config, run = executor.config, executor.decode_config
    plain = Driver(Executor(executor.params, config, run, executor.mesh))
    before = executor.cache = make_cache(config, executor.sizes, run.dtype, executor.mesh)
    arrays = numbers["kimi-linear-tiny"]
    for found, wanted in zip(scenario(linear, arrays), scenario(plain, arrays), strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_no_output_shares_a_donated_buffer(linear):
    executor = linear.executor
    step = executor.steps[-1]
    output = executor.run(step, executor.empty_batch(step))
    executor.run(step, executor.empty_batch(step))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(output))


def test_all_of_a_step_stays_where_it_is(linear):
    """A command buffer holds addresses: one that differs has all its nodes updated."""
    executor = linear.executor
    kept, places = [], set()
    for step in executor.steps:
        for slot in (1, 2, 1):
            batch = executor.empty_batch(step)
            batch.slots[0] = slot
            output = executor.run(step, batch)
            kept.append((output, [np.asarray(leaf).copy() for leaf in jax.tree.leaves(output)]))
            _, buffers = executor._compiled[step]
            own = (buffers._batch, buffers._output, executor.cache, executor.health)
            own = jax.tree.leaves(own)
            places.add((step, *(leaf.unsafe_buffer_pointer() for leaf in own)))
            assert int(buffers._batch.slots[0]) == slot
    assert len(places) == len(executor.steps)
    for output, values in kept:
        for leaf, value in zip(jax.tree.leaves(output), values, strict=True):
            assert np.asarray(leaf).tobytes() == value.tobytes()


def test_a_step_of_one_row_copies_no_pool(linear):
    """Of a context that is read at once too: the row is written where the pool lies."""
    executor = linear.executor
    pool = next(each for each in executor.cache.layers if isinstance(each, MlaPages)).latents
    shape = f"f32[{','.join(map(str, pool.shape))}]"
    text = executor._lower(Step("decode", 1, 1), executor.sizes).compile().as_text()
    assert shape in text
    assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]


def test_commit_leaves_nothing_pending(linear, numbers):
    """After a commit of all slots the text goes on as it would have."""
    arrays = numbers["kimi-linear-tiny"]
    wanted = arrays["seq0.greedy"].tolist()
    assert linear.greedy(1, arrays["seq0.input_ids"], 6) == wanted[:6]
    executor = linear.executor
    slots, accepted = np.arange(3, dtype=np.int32), np.array(executor.cache.slots.accepted)
    assert accepted[1] == 1
    executor.cache = jax.jit(commit, donate_argnums=0)(executor.cache, slots, accepted)
    assert not np.asarray(executor.cache.slots.accepted).any()
    tokens = [token for _ in range(3) for token in linear.decode([1])[0][1]]
    assert tokens == wanted[6:9]


def test_refusals(linear):
    executor = linear.executor
    with pytest.raises(ValueError, match="was not compiled"):
        executor.run(Step("decode", 7, 1), None)
    with pytest.raises(ValueError, match=r"slot 3 lies outside \[1, 2\]"):
        executor.admit(3, None)
    config, decode_config = executor.config, executor.decode_config
    wrong = {**executor.params, "extra": executor.params["norm"], "norm": executor.params["embed"]}
    with pytest.raises(ValueError, match=r"\['extra'\] is .*\['norm'\] is ") as error:
        check_params(wrong, config, 1)
    assert "embed" not in str(error.value)
    small = DecodeConfig(**{**LINEAR_RUN, "dtype": "float32", "cache_memory": 10_000})
    with pytest.raises(ValueError, match="lower max_requests or max_context"):
        Executor(executor.params, config, small, executor.mesh)
    assert decode_config.cache_memory is None
    with pytest.raises(ValueError, match="tp is 2, but the mesh has 1 devices"):
        Executor(executor.params, config, replace(decode_config, tp=2), executor.mesh)


def test_pages_fill_the_memory_that_is_left(linear, monkeypatch):
    """A device of so many bytes, with parameters, the cache and the largest step's scratch."""
    executor = linear.executor
    config, sizes = executor.config, executor.sizes
    each = page_bytes(config, sizes, "float32")
    fixed = fixed_bytes(config, sizes, "float32", 1)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(executor.cache))
    assert total == sizes.pages * each + fixed
    in_use, scratch, pages = 12_345, 6_789, sizes.max_pages + 3
    limit = (in_use + scratch + fixed + pages * each + each // 2) / (1 - executor_module.RESERVE)
    monkeypatch.setattr(executor_module, "device_memory", lambda mesh: (int(limit), in_use))
    asked = []

    def lower(step, sizes):
        asked.append((step.kind, sizes.pages))
        temporary = scratch - 89 if step.kind == "decode" else 100
        analysis = SimpleNamespace(temp_size_in_bytes=temporary, generated_code_size_in_bytes=89)
        compiled = SimpleNamespace(memory_analysis=lambda: analysis)
        return SimpleNamespace(compile=lambda: compiled)

    monkeypatch.setattr(executor, "_lower", lower)
    assert executor._choose_sizes().pages == pages
    assert asked == [("prefill", 2), ("decode", 2)]
