"""Refusals, binding and the choice of a step, without a step that is compiled."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from made import made_config, made_weights, run_of

from k3jax.cache import CacheSizes, make_cache
from k3jax.config import K3Config
from k3jax.decode.layers import layer_kernels
from k3jax.decode.reasons import BatchRows
from k3jax.decode.specialized import SpecializedDecode
from k3jax.parallel import make_mesh, shardings
from k3jax.params import pack_params, packed_shapes, packed_specs

SIZES = CacheSizes(slots=5, pages=9, page_size=16, max_pages=8, pending=3)
BUILDS = ((1, 2), (1, 4), (3, 4))
LINEAR_REASONS = (
    "latent MoE: found experts of the full width, kernel reads a latent; "
    "AttnRes: found plain residuals, kernel reads attention residuals; "
    "routed scaling factor: found 2.446, kernel reads 1"
)
END = " (--decode-backend auto runs the stock path)"


def rows(*decoding):
    return BatchRows(decoding=decoding)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1)


@pytest.fixture(scope="module")
def config(golden):
    return made_config(golden, ("kda", "kda", "mla"), block=2)


@pytest.fixture(scope="module")
def params(config, mesh):
    return pack_params(made_weights(config), config, mesh)


@pytest.fixture
def told():
    return []


@pytest.fixture
def make(params, config, mesh, told):
    """SpecializedDecode of a backend; everything that it says is in `told`."""

    def start(backend, params=params, config=config, **fields):
        run = run_of(backend, builds=BUILDS, **{"impl": "interpret", **fields})
        return SpecializedDecode(params, config, run, mesh, say=told.append)

    return start


@pytest.fixture
def cache(config, mesh):
    return make_cache(config, SIZES, "float32", mesh)


def test_a_bound_cache_gets_the_smallest_step(make, cache, told):
    special = make("auto")
    assert not told
    assert special.reason(rows(1), 7) == "cache not bound"
    assert special.prepare_kv(cache, SIZES, 7)
    for decoding, found in [((1,), (2, 1)), ((1,) * 3, (4, 1)), ((3,), (4, 3)), ((3,) * 4, (4, 3))]:
        step = special.plan(rows(*decoding), 7)
        assert (step.requests, step.rows, step.specialized) == (*found, True)
    assert [step.layer(index) is None for index in range(3)] == [True, False, False]
    assert special.plan(BatchRows(prefilling=(3,)), 7) is None
    assert not told
    assert special.plan(rows(2, 2), 7) is None
    assert special.plan(rows(2), 7) is None
    assert told == ["decode steps run on the stock path: unbuilt width"]


def test_layers_of_a_kind_share_their_function(make, config):
    step = make("auto").steps[0]
    assert step.layer(1).graph != step.layer(2).graph
    heavy = replace(config, num_layers=9, mixers=("kda",) * 9, ffns=("dense",) + ("moe",) * 8)
    found = layer_kernels(heavy, 1, "interpret")
    assert len({found(index) for index in range(1, 9)}) == 2  # one of them starts a block


def test_another_cache_or_other_parameters_stop_the_engine(make, cache, params):
    special = make("auto")
    special.prepare_kv(cache, SIZES, 7)
    special.check(params, 7)
    assert special.plan(rows(1), 8) is None
    with pytest.raises(RuntimeError, match="call prepare_kv"):
        special.check(params, 8)
    with pytest.raises(RuntimeError, match="not the parameters"):
        special.check(dict(params), 7)
    assert special.prepare_kv(cache, SIZES, 8)
    with pytest.raises(RuntimeError, match="call prepare_kv"):
        special.check(params, 7)


def test_a_refused_cache_leaves_the_kernels_unbound(make, cache, told, config, mesh):
    small = replace(SIZES, slots=4)
    special = make("auto")
    assert special.prepare_kv(cache, SIZES, 1)
    assert not special.prepare_kv(cache, small, 2)
    assert special.reason(rows(1), 2) == "cache not bound"
    assert told[0].startswith("decode steps run on the stock path, this cache: layers.1.conv: ")
    assert not special.prepare_kv(None, SIZES, 3)
    forced = make("specialized")
    with pytest.raises(ValueError, match=r"does not support this cache: layers.1.conv: found "):
        forced.prepare_kv(cache, small, 1)
    with pytest.raises(RuntimeError, match="cannot be specialized: cache not bound"):
        forced.plan(rows(1), 1)
    forced.prepare_kv(cache, SIZES, 2)
    with pytest.raises(RuntimeError, match="cannot be specialized: not uniform"):
        forced.plan(rows(1, 2), 2)
    assert forced.plan(BatchRows(prefilling=(3,)), 2) is None


def test_refused_weights(make, params, told):
    layers = params["layers"]
    broken = {name: array for name, array in layers[1].items() if name != "attn_norm"}
    wrong = {**params, "layers": {**layers, 1: broken}}
    reason = "layers.1.attn_norm: missing, kernel reads bfloat16[128]"
    special = make("auto", params=wrong)
    assert (special.steps, special.refused) == ((), "weights")
    assert told == [f"decode steps run on the stock path, these weights: {reason}"]
    assert special.plan(rows(1), 0) is None
    assert special.reason(rows(1), 0) == "weights"
    assert len(told) == 1  # once
    with pytest.raises(ValueError) as error:
        make("specialized", params=wrong)
    start = "Kimi-K3 specialized decode does not support these weights: "
    assert str(error.value) == start + reason + END


def test_kimi_linear_is_refused_for_what_it_lacks(make, golden, mesh, told):
    linear = K3Config.from_file(golden / "kimi-linear-tiny")
    zeros = jax.tree.map(
        lambda shape, split: jax.device_put(np.zeros(shape.shape, shape.dtype), split),
        packed_shapes(linear, 1),
        shardings(mesh, packed_specs(linear)),
    )
    assert make("auto", params=zeros, config=linear).steps == ()
    assert told == [f"decode steps run on the stock path, these weights: {LINEAR_REASONS}"]
    with pytest.raises(ValueError) as error:
        make("specialized", params=zeros, config=linear)
    start = "Kimi-K3 specialized decode does not support these weights: "
    assert str(error.value) == start + LINEAR_REASONS + END


def test_where_kernels_do_not_run(make, told):
    if jax.default_backend() == "cpu":
        assert make("auto", impl=None).refused == "platform"
        assert "found cpu" in told.pop()
    assert make("auto", impl="reference").refused == "platform"
    with pytest.raises(ValueError, match=r"support this platform: impl: found reference, .*auto"):
        make("specialized", impl="reference")
    assert make("stock").refused == "backend"
    assert len(told) == 1
