"""Any number of ranks gives the text of one, with two reductions a layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driving import Driver
from made import drafters, drive, made_config, made_weights, run_of, text_of

from k3jax.cache import CacheSizes, abstract_cache
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.batch import Step, empty_batch
from k3jax.decode.executor import Executor
from k3jax.decode.layers import layer_kernels
from k3jax.decode.step import build_step
from k3jax.model.decoder import abstract_decoder
from k3jax.parallel import make_mesh
from k3jax.params import packed_shapes, packed_specs

PROMPT = [7, 300, 41, 5, 66, 9, 450]
BUILDS = ((2, 1),)


@pytest.fixture(scope="module")
def config(golden):
    """Widths that eight ranks can share."""
    return made_config(golden, ("kda", "kda", "mla"), block=2, heads=8, inner=256)


@pytest.fixture(scope="module")
def one(config):
    driver = drive(config, made_weights(config), run_of("stock", builds=BUILDS))
    wanted = text_of(driver, PROMPT, 16, rows=2, drafter=lambda tokens: [-1])
    return wanted


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_many_ranks_give_the_text_of_one(config, one, tp):
    driver = drive(config, made_weights(config), run_of("stock", builds=BUILDS, tp=tp))
    drafter = drafters(one, 2, config.vocab_size)["mixed"]
    assert text_of(driver, PROMPT, 16, rows=2, drafter=drafter) == one
    step = driver.executor.steps[-1]
    output = driver.executor.run(step, driver.executor.empty_batch(step))
    leaves = jax.tree.leaves((output, driver.executor.cache, driver.executor.health))
    whole = [leaf for leaf in leaves if leaf.sharding.is_fully_replicated]
    assert len(whole) > 20
    for leaf in whole:
        parts = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(parts) == 1


def test_two_ranks_decode_the_recorded_text(golden):
    config, mesh = K3Config.from_file(golden / "k3-tiny-a"), make_mesh(2)
    run = run_of("stock", builds=((1, 1),), tp=2, prefill_buckets=((1, 64),))
    params = load_params(golden / "k3-tiny-a", config, mesh)
    driver = Driver(Executor(params, config, run, mesh))
    with np.load(golden / "k3-tiny-a" / "golden.npz") as arrays:
        prompt, wanted = arrays["seq1.input_ids"], arrays["seq1.greedy"].tolist()
    assert driver.greedy(1, prompt, 24) == wanted


def bodies(config, tp, step):
    """The functions that the layers share, as StableHLO, by how often they are called."""
    mesh = make_mesh(tp)
    run = run_of("stock", builds=((step.rows, step.requests),), tp=tp)
    sizes = CacheSizes(run.slots, 9, run.page_size, run.max_pages, run.pending)
    impl = "interpret" if step.specialized else "reference"
    graph, _ = abstract_decoder(config, tp, impl, run.dtype)
    function = build_step(graph, config, run, step, mesh=mesh, param_specs=packed_specs(config))
    text = function.lower(
        packed_shapes(config, tp),
        abstract_cache(config, sizes, run.dtype, mesh),
        empty_batch(step, sizes, config.vocab_size),
        jax.ShapeDtypeStruct((), jnp.uint32),
    ).as_text()
    functions = re.split(r"(?=func\.func )", text)
    named = {re.search(r"@(\w+)", part)[1]: part for part in functions if "@" in part[:200]}
    return {
        name: (part.count("stablehlo.all_reduce"), text.count(f"call @{name}("))
        for name, part in named.items()
        if name.startswith("layer_body")
    }, text.count("stablehlo.all_reduce")


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("tp", [1, 4])
def test_two_reductions_a_layer(golden, kernels, tp):
    """The attention's output, and the experts with the shared experts; one more embeds."""
    mixers = ("kda", "kda", "mla", "kda", "mla", "kda")
    config = made_config(golden, mixers, block=8, heads=8, inner=128)
    step = Step("decode", 2, 1)
    if kernels:
        found = layer_kernels(config, tp, "interpret")
        step = Step("decode", 2, 1, specialized=True, kernels=found)
    shared, total = bodies(config, tp, step)
    assert sorted(calls for _, calls in shared.values()) == [1, 2, 3]  # dense, MLA, KDA
    if tp == 1:
        assert total == 0  # one rank has nobody to talk to
        return
    assert {reductions for reductions, _ in shared.values()} == {2}
    assert total == 1 + 2 * len(shared)


def test_what_does_not_divide_is_told(config):
    with pytest.raises(ValueError, match="of 3 does not divide: heads of KDA 8 by 3, heads of MLA"):
        drive(config, made_weights(config), run_of("stock", builds=BUILDS, tp=3))
