"""Packing: each rank holds [q|k|v|...] of its own heads at every TP, and nothing is lost."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import parallel
from k3jax.config import K3Config
from k3jax.logical import ENDS, check_tp, group_params, groups
from k3jax.params import (
    JAX_DTYPES,
    logical_params,
    pack_params,
    packed_shapes,
    packed_specs,
)
from pallas_kernels.mxfp4 import pack_words

MODELS = ("k3-tiny-a", "kimi-linear-tiny")


def read_config(golden, model):
    """The golden model's config, with experts wide enough for TP 4."""
    config = K3Config.from_file(golden / model)
    if config.moe.mxfp4:
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, inner=128))
    return config


def random_logical(config):
    """Whole logical arrays, each element almost surely different from its neighbours."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, spec in logical_params(config).items():
        if spec.dtype == "u8":
            arrays[name] = rng.integers(0, 255, spec.shape, dtype=np.uint8)
        else:
            arrays[name] = rng.standard_normal(spec.shape).astype(JAX_DTYPES[spec.dtype])
    return arrays


@pytest.fixture(scope="module", params=MODELS)
def model(request, golden):
    config = read_config(golden, request.param)
    return config, random_logical(config)


def rows(array, rank, tp):
    """The part of one rank when the first axis is split."""
    size = array.shape[0] // tp
    return array[rank * size : (rank + 1) * size]


def columns(array, rank, tp):
    return np.moveaxis(rows(np.moveaxis(array, -1, 0), rank, tp), 0, -1)


def expected_kda(x, rank, tp):
    def part(name):
        return rows(x[f"kda.{name}"], rank, tp)

    gate = part("g") if "kda.g" in x else x["kda.g_a"]
    return {
        "in_proj": np.concatenate([part("q"), part("k"), part("v"), gate, x["kda.f_a"], part("b")]),
        "conv": np.concatenate([part("conv_q"), part("conv_k"), part("conv_v")]).T,
        "o_proj": columns(x["kda.o"], rank, tp),
        "o_norm": x["kda.o_norm"],
        **{name: part(name) for name in ("f_b", "g_b", "a_log", "dt_bias") if f"kda.{name}" in x},
    }


def expected_mla(x, rank, tp, config):
    def part(name):
        return rows(x[f"mla.{name}"], rank, tp)

    mla = config.mla
    query = part("q") if "mla.q" in x else x["mla.q_a"]
    gate = [part("g")] if "mla.g" in x else []
    heads = x["mla.kv_b"].reshape(mla.num_heads, -1, mla.kv_lora_rank)
    result = {
        "in_proj": np.concatenate([query, x["mla.kv_a"], *gate]),
        "kv_norm": x["mla.kv_a_norm"],
        "w_uk": rows(heads[:, : mla.qk_nope_head_dim], rank, tp),
        "w_uv": rows(heads[:, mla.qk_nope_head_dim :], rank, tp),
        "o_proj": columns(x["mla.o"], rank, tp),
    }
    if "mla.q_a" in x:
        result |= {"q_a_norm": x["mla.q_a_norm"], "q_b": part("q_b")}
    return result


def expected_ffn(x, rank, tp):
    if "dense.gate" in x:
        gate_up = [rows(x["dense.gate"], rank, tp), rows(x["dense.up"], rank, tp)]
        return {"gate_up": np.concatenate(gate_up), "down": columns(x["dense.down"], rank, tp)}

    def inner(name):
        return np.moveaxis(rows(np.moveaxis(x[f"moe.{name}"], 1, 0), rank, tp), 0, 1)

    shared = [rows(x["moe.shared_gate"], rank, tp), rows(x["moe.shared_up"], rank, tp)]
    result = {
        name: x[f"moe.{name}"]
        for name in ("router", "bias", "down", "latent_norm", "up")
        if f"moe.{name}" in x
    }
    result |= {
        "shared_gate_up": np.concatenate(shared),
        "shared_down": columns(x["moe.shared_down"], rank, tp),
        "w13": np.concatenate([inner("w1"), inner("w3")], axis=1),
        "w2": columns(x["moe.w2"], rank, tp),
    }
    if "moe.w1_scale" in x:
        result["w13_scale"] = np.concatenate([inner("w1_scale"), inner("w3_scale")], axis=1)
        result["w2_scale"] = columns(x["moe.w2_scale"], rank, tp)
        for name in ("w13", "w2"):
            result[name] = np.asarray(pack_words(result[name]))
    return result


def shard(array, rank):
    """One rank's part of a sharded array."""
    by_device = {each.device: each.data for each in array.addressable_shards}
    return np.asarray(by_device[array.sharding.mesh.devices.flat[rank]])


def assert_equal_trees(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_holds_its_own_parts(model, tp):
    config, logical = model
    packed = pack_params(logical, config, parallel.make_mesh(tp))
    for rank in range(tp):
        local = jax.tree.map(functools.partial(shard, rank=rank), packed)
        for layer, tree in local["layers"].items():
            start = f"layers.{layer}."
            x = {k.removeprefix(start): v for k, v in logical.items() if k.startswith(start)}
            is_kda = config.mixers[layer] == "kda"
            mixer = expected_kda(x, rank, tp) if is_kda else expected_mla(x, rank, tp, config)
            assert_equal_trees(tree.pop("mixer"), mixer)
            assert_equal_trees(tree.pop("ffn"), expected_ffn(x, rank, tp))
            assert_equal_trees(tree, {name: v for name, v in x.items() if "." not in name})
        ends = {name: logical[name] for name in group_params(config, ENDS)}
        ends |= {name: rows(ends[name], rank, tp) for name in ("embed", "head")}
        del local["layers"]
        assert_equal_trees(local, ends)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_and_specs_describe_the_packed_arrays(model, tp):
    config, logical = model
    mesh = parallel.make_mesh(tp)
    packed = pack_params(logical, config, mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packed)
    assert packed_shapes(config, tp) == shapes
    wanted = parallel.shardings(mesh, packed_specs(config))
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), packed, wanted)
    assert all(jax.tree.leaves(same))


def test_layers_of_a_kind_share_one_compilation(golden):
    from k3jax import params

    config = dataclasses.replace(K3Config.from_file(golden / "kimi-linear-tiny"), pad_token_id=0)
    params._jitted_pack.cache_clear()
    pack_params(random_logical(config), config, parallel.make_mesh(1))
    kinds = set(zip(config.mixers, config.ffns, strict=True))
    assert params._jitted_pack.cache_info().misses == 1 + len(kinds)


def test_full_size_shapes(request):
    data = request.path.parent / "data"
    config = K3Config.from_file(data / "k3-config.json")
    shapes = packed_shapes(config, 8)
    mixer, ffn = shapes["layers"][1]["mixer"], shapes["layers"][1]["ffn"]
    assert mixer["in_proj"].shape == (8 * (4 * 1536 + 128 + 12), 7168)
    assert mixer["conv"] == jax.ShapeDtypeStruct((4, 36864), jnp.float32)
    assert ffn["w13"] == jax.ShapeDtypeStruct((896, 6144, 448), jnp.uint32)
    assert ffn["w2_scale"] == jax.ShapeDtypeStruct((896, 3584, 96), jnp.uint8)
    assert shapes["layers"][3]["mixer"]["w_uk"].shape == (96, 128, 512)
    total = sum(math.prod(spec.shape) for spec in logical_params(config).values())
    assert total > 1.4e12


def test_what_does_not_divide_is_named(golden):
    config = K3Config.from_file(golden / "k3-tiny-a")
    with pytest.raises(ValueError, match="expert inner width 64 by 128"):
        packed_shapes(config, 4)
    with pytest.raises(ValueError, match=r"heads of KDA 8 by 3.*vocabulary 512 by 3"):
        check_tp(config, 3)
    with pytest.raises(ValueError, match=">= 1"):
        check_tp(config, 0)


def test_wrong_arrays_are_named_together(golden):
    config = K3Config.from_file(golden / "kimi-linear-tiny")
    logical = random_logical(config)
    del logical["norm"]
    logical["layers.0.kda.q"] = logical["layers.0.kda.q"][1:]
    logical["layers.9.kda.q"] = logical["head"]
    with pytest.raises(ValueError) as error:
        pack_params(logical, config, parallel.make_mesh(1))
    for part in ("norm is missing", "layers.9.kda.q is unknown", "layers.0.kda.q is bfloat16(63,"):
        assert part in str(error.value)


def test_groups_hold_every_parameter_once(model):
    config, _ = model
    names = [
        name if group == ENDS else f"{group}.{name}"
        for group in groups(config)
        for name in group_params(config, group)
    ]
    assert names == list(logical_params(config))
