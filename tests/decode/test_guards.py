"""Each fault of weights or caches alone, and together: the reasons name all and nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.cache import CacheSizes, make_cache
from k3jax.config import K3Config
from k3jax.decode.guards import READS, cache_reasons, weight_reasons
from k3jax.decode.kinds import layer_kinds
from k3jax.parallel import make_mesh, shardings
from k3jax.params import packed_shapes, packed_specs

SIZES = CacheSizes(slots=3, pages=5, page_size=16, max_pages=4, pending=2)


def zeros(config, mesh):
    """A packed tree of zeros."""
    return jax.tree.map(
        lambda shape, split: jax.device_put(np.zeros(shape.shape, shape.dtype), split),
        packed_shapes(config, mesh.size),
        shardings(mesh, packed_specs(config)),
    )


@pytest.fixture(scope="module")
def config(golden):
    return K3Config.from_file(golden / "k3-tiny-a")


@pytest.fixture(scope="module")
def linear(golden):
    return K3Config.from_file(golden / "kimi-linear-tiny")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(2)


@pytest.fixture(scope="module")
def params(config, mesh):
    return zeros(config, mesh)


@pytest.fixture(scope="module")
def cache(config, mesh):
    return make_cache(config, SIZES, "float32", mesh)


def changed(tree, path, value):
    """A copy of nested dicts with one entry replaced, or removed by None."""
    first, rest = path[0], path[1:]
    value = changed(tree[first], rest, value) if rest else value
    return {name: entry for name, entry in (tree | {first: value}).items() if entry is not None}


def set_all(params, faults):
    for path, value in faults.items():
        head, *rest = path.split(".")
        params = changed(params, ["layers", int(head), *rest], value)
    return params


def test_what_fits_has_no_reason(params, cache, config, mesh):
    assert weight_reasons(params, config, mesh) == []
    assert cache_reasons(cache, config, SIZES, "float32", mesh) == []


def test_the_table_names_what_a_model_has(config):
    """Every entry exists in the packed tree, and a whole layer has nothing else."""
    layers = packed_shapes(config, 1)["layers"]
    for index, kind in enumerate(layer_kinds(config)):
        flat = jax.tree_util.tree_leaves_with_path(layers[index])
        names = {".".join(str(key.key) for key in path) for path, _ in flat}
        assert set(READS[kind]) <= names
        if kind == "whole":
            assert set(READS[kind]) == names


@pytest.mark.parametrize("path", READS["whole"])
def test_a_missing_array_is_missing(params, config, mesh, path):
    (reason,) = weight_reasons(set_all(params, {f"4.{path}": None}), config, mesh)
    assert reason.startswith(f"layers.4.{path}: missing, kernel reads ")


def test_every_fault_is_named_at_once(params, config, mesh):
    rows = NamedSharding(mesh, PartitionSpec("tp", None))
    other = NamedSharding(make_mesh(2, jax.devices()[2:]), PartitionSpec())
    deleted = jnp.zeros((16,), jnp.float32)
    deleted.delete()
    layer = params["layers"][2]
    faults = {
        "1.attn_norm": np.zeros(128, jnp.bfloat16),
        "1.mixer.in_proj": layer["mixer"]["in_proj"][:-1],
        "2.mixer.conv": layer["mixer"]["conv"].astype(jnp.bfloat16),
        "2.ffn.bias": deleted,
        "3.ffn.router": jax.device_put(layer["ffn"]["router"], rows),
        "3.ffn.w2": jax.device_put(
            layer["ffn"]["w2"], layer["ffn"]["w2"].sharding.with_memory_kind("pinned_host")
        ),
        "5.ffn_norm": jax.device_put(layer["ffn_norm"], other),
        "6.ffn.up": None,
        "6.mixer.o_proj": 3,
        # Arrays that no kernel reads are none of the guard's business.
        "0.ffn.down": None,
        "3.mixer.w_uk": None,
    }
    in_proj = layer["mixer"]["in_proj"].shape
    wanted = [
        "layers.1.attn_norm: found a host array (ndarray), kernel reads a device array",
        f"layers.1.mixer.in_proj: found bfloat16[{in_proj[0] - 1},128], "
        f"kernel reads bfloat16[{in_proj[0]},128]",
        "layers.2.ffn.bias: found it deleted by donation, kernel reads a live array",
        "layers.2.mixer.conv: found bfloat16[4,768], kernel reads float32[4,768]",
        "layers.3.ffn.router: found ('tp', None) on devices [0, 1], "
        "kernel reads (None, None) on devices [0, 1]",
        "layers.3.ffn.w2: found in pinned_host memory, kernel reads device memory",
        "layers.5.ffn_norm: found () on devices [2, 3], kernel reads (None,) on devices [0, 1]",
        "layers.6.mixer.o_proj: found int, kernel reads bfloat16[128,256]",
        "layers.6.ffn.up: missing, kernel reads bfloat16[128,96]",
    ]
    found = weight_reasons(set_all(params, faults), config, mesh)
    # Slicing may leave in_proj split otherwise as well.
    found = [reason for reason in found if "in_proj: found (" not in reason]
    assert found == wanted


def test_a_fault_of_structure_ends_the_layers_list(params, config, mesh):
    faults = dict.fromkeys(("1.ffn.w13_scale", "1.ffn.w2_scale", "1.attn_norm"))
    faults |= dict.fromkeys(("2.ffn.down", "2.ffn.latent_norm", "2.ffn.up", "2.ffn.router"))
    faults |= dict.fromkeys(("3.ffn.shared_gate_up", "3.ffn.shared_down", "3.mixer.o_proj"))
    faults |= {"4.mixer": None, "4.ffn": None, "5.ffn": params["layers"][0]["ffn"]}
    wrong = set_all(params, faults)
    wrong = changed(wrong, ["layers", 6], None)
    assert weight_reasons(wrong, config, mesh) == [
        "layers.1.ffn: found experts without scales, kernel reads packed MXFP4",
        "layers.2.ffn: found experts without a latent, kernel reads a latent MoE",
        "layers.3.ffn: found no shared experts, kernel reads them",
        "layers.4.mixer: missing",
        "layers.5.ffn: found no experts, kernel reads a latent MoE",
        "layers.6: missing",
    ]


def test_experts_that_are_not_quantized(config, mesh):
    plain = replace(config, moe=replace(config.moe, mxfp4=False))
    reasons = weight_reasons(zeros(plain, mesh), plain, mesh)
    assert len(reasons) == 6
    assert all("kernel reads packed MXFP4" in reason for reason in reasons)


def test_facts_of_the_model(params, config, linear, mesh):
    other = replace(
        config,
        mixers=("mla",) * config.num_layers,
        activation="silu",
        moe=replace(config.moe, scaling=2.5),
    )
    assert weight_reasons(zeros(other, mesh), other, mesh) == [
        "routed scaling factor: found 2.5, kernel reads 1",
        "no layer has KDA before its mixture of experts, kernel reads one",
        "activation: found silu, kernel reads situ",
    ]
    dense = replace(config, ffns=("dense",) * config.num_layers)
    assert weight_reasons({}, dense, mesh) == [
        "no layer has a mixture of experts, kernel reads one"
    ]
    assert weight_reasons({}, linear, mesh) == [
        "latent MoE: found experts of the full width, kernel reads a latent",
        "AttnRes: found plain residuals, kernel reads attention residuals",
        "routed scaling factor: found 2.446, kernel reads 1",
    ]
    (reason,) = weight_reasons(params, config, make_mesh(3))
    assert "tensor parallelism of 3 does not divide: heads of KDA 8 by 3" in reason


def test_caches(cache, config, linear, mesh):
    assert cache_reasons(replace(cache, layers=()), config, SIZES, "float32", mesh) == [
        "cache: found 0 layers, kernel reads 7"
    ]
    layers = list(cache.layers)
    layers[1] = replace(layers[1], state=layers[1].state.astype(jnp.bfloat16))
    layers[2] = replace(layers[2], pending=replace(layers[2].pending, key=None))
    layers[3] = replace(layers[3], latents=np.asarray(layers[3].latents))
    layers[4] = replace(layers[4], conv=jnp.copy(layers[4].conv))
    layers[4].conv.delete()
    layers[5] = layers[6]
    whole = NamedSharding(mesh, PartitionSpec())
    layers[6] = replace(layers[6], latents=jax.device_put(layers[6].latents[:, :8], whole))
    assert cache_reasons(replace(cache, layers=tuple(layers)), config, SIZES, "float32", mesh) == [
        "layers.1.state: found bfloat16[3,8,32,32], kernel reads float32[3,8,32,32]",
        "layers.2.pending.key: missing, kernel reads float32[3,8,8,32]",
        "layers.3.latents: found a host array (ndarray), kernel reads a device array",
        "layers.4.conv: found it deleted by donation, kernel reads a live array",
        "layers.5: found MlaPages, kernel reads KdaCache",
        "layers.6.latents: found float32[5,8,48], kernel reads float32[5,16,48]",
    ]


def test_a_cache_of_another_run(cache, config, mesh):
    """Other dtype, sizes or device: of every array that differs, and of no float32 state."""
    reasons = cache_reasons(cache, config, SIZES, "bfloat16", mesh)
    assert len(reasons) == 4 * 2 + 2
    assert not any(".state" in reason or ".decay" in reason for reason in reasons)
    one = make_cache(config, replace(SIZES, slots=1, pages=1), "float32", mesh)
    reasons = cache_reasons(one, config, replace(SIZES, slots=1, pages=1), "float32", mesh)
    assert reasons == [
        f"{name}: found 1, kernel reads a null one at 0 and at least one more"
        for name in ("slots", "pages")
    ]
    reasons = cache_reasons(cache, config, SIZES, "float32", make_mesh(2, jax.devices()[2:]))
    assert "layers.3.latents: found () on devices [0, 1]" in " ".join(reasons)
