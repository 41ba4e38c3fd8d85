"""Loading reads each tensor to its place, and only the slices that this process holds."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax import parallel
from k3jax.checkpoint import load_params, open_checkpoint
from k3jax.checkpoint.shards import read_into
from k3jax.logical import groups
from k3jax.params import packed_shapes, packed_specs
from pallas_kernels.mxfp4 import pack_words

K3 = "language_model.model."


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=False)


def same_params(found, wanted):
    assert jax.tree.all(
        jax.tree.map(lambda a, b: same(np.asarray(a), np.asarray(b)), found, wanted)
    )


def test_the_tree_is_what_params_promises(either):
    mesh = parallel.make_mesh(2)
    params = load_params(either.directory, either.config, mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == packed_shapes(either.config, 2)
    wanted = parallel.shardings(mesh, packed_specs(either.config))
    fits = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, wanted)
    assert all(jax.tree.leaves(fits))


def test_k3_values(k3):
    params = load_params(k3.directory, k3.config, parallel.make_mesh(1))
    mixer, ffn = params["layers"][1]["mixer"], params["layers"][1]["ffn"]
    attention = f"{K3}layers.1.self_attn."
    rows = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    in_proj = np.concatenate([k3.values(f"{attention}{name}.weight") for name in rows])
    assert same(np.asarray(mixer["in_proj"]), in_proj)
    conv = np.concatenate([k3.values(f"{attention}{name}_conv1d.weight")[:, 0] for name in "qkv"]).T
    assert same(np.asarray(mixer["conv"]), conv)
    assert same(np.asarray(mixer["a_log"]), k3.values(f"{attention}A_log")[:8])
    packed = [
        k3.values(f"{K3}layers.1.block_sparse_moe.experts.5.{name}.weight_packed")
        for name in ("w1", "w3")
    ]
    assert same(np.asarray(ffn["w13"][5]), np.asarray(pack_words(np.concatenate(packed))))
    assert same(np.asarray(params["head"]), k3.values("language_model.lm_head.weight"))
    assert same(np.asarray(params["res_proj"]), k3.values(f"{K3}output_attn_res_proj.weight")[0])


def test_kimi_linear_values_widen_exactly(linear):
    params = load_params(linear.directory, linear.config, parallel.make_mesh(1))
    mixer, ffn = params["layers"][1]["mixer"], params["layers"][1]["ffn"]
    norm = linear.values("model.layers.1.self_attn.o_norm.weight")
    assert norm.dtype == ml_dtypes.bfloat16
    assert same(np.asarray(mixer["o_norm"]), norm.astype(np.float32))
    a_log = linear.values("model.layers.1.self_attn.A_log")
    assert same(np.asarray(mixer["a_log"]), a_log.reshape(-1))
    assert ffn["bias"].dtype == jnp.float32
    w2 = [linear.values(f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight") for e in range(8)]
    assert same(np.asarray(ffn["w2"]), np.stack(w2))


def test_every_tp_holds_the_same_weights(linear):
    whole = load_params(linear.directory, linear.config, parallel.make_mesh(1))
    split = load_params(linear.directory, linear.config, parallel.make_mesh(4))
    for name in ("embed", "head"):
        assert same(np.asarray(whole[name]), np.asarray(split[name]))
    for layer in whole["layers"]:
        a, b = whole["layers"][layer], split["layers"][layer]
        assert same(np.asarray(a["mixer"]["o_proj"]), np.asarray(b["mixer"]["o_proj"]))


def test_a_log_of_bare_heads_and_f32_where_kimi_linear_has_bf16(linear):
    for name, (_, values) in linear.all().items():
        file = linear.files[linear.file_of(name)]
        if name.endswith("A_log"):
            file[name] = ("F32", values.reshape(-1))
        if "conv1d" in name or "e_score_correction_bias" in name:
            file[name] = ("F32", values.astype(np.float32))
    before = load_params(linear.directory, linear.config, parallel.make_mesh(1))
    linear.write()
    same_params(load_params(linear.directory, linear.config, parallel.make_mesh(1)), before)


def test_vision_and_later_layers_are_left_alone(k3):
    file = k3.files["model-00001-of-000003.safetensors"]
    for name in ("vision_tower.encoder.blocks.0.wo.weight", "mm_projector.linear_1.weight"):
        file[name] = ("BF16", np.zeros((2, 2), ml_dtypes.bfloat16))
    file[f"{K3}layers.7.input_layernorm.weight"] = ("F32", np.zeros(3, np.float32))
    before = load_params(k3.directory, k3.config, parallel.make_mesh(1))
    k3.write()
    same_params(load_params(k3.directory, k3.config, parallel.make_mesh(1)), before)


def test_fewer_layers_than_the_files_hold(k3):
    config = dataclasses.replace(
        k3.config, num_layers=2, mixers=k3.config.mixers[:2], ffns=k3.config.ffns[:2]
    )
    params = load_params(k3.directory, config, parallel.make_mesh(1))
    assert list(params["layers"]) == [0, 1]


def test_one_file_needs_no_index(k3):
    before = load_params(k3.directory, k3.config, parallel.make_mesh(1))
    k3.files = {"model.safetensors": k3.all()}
    for file in k3.directory.glob("*.safetensors*"):
        file.unlink()
    k3.write()
    same_params(load_params(k3.directory, k3.config, parallel.make_mesh(1)), before)


def test_progress_counts_this_process_bytes(linear):
    steps = []
    load_params(linear.directory, linear.config, parallel.make_mesh(2), progress=steps.append)
    assert [step.group for step in steps] == list(groups(linear.config))
    assert [step.groups_done for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].bytes_done > 500_000
    assert steps[-1].bytes_per_second > 0


def test_each_rank_reads_only_its_slice(k3, monkeypatch):
    read = []
    preadv = os.preadv

    def spy(descriptor, buffers, start):
        read.append(preadv(descriptor, buffers, start))
        return read[-1]

    with open_checkpoint(k3.directory, k3.config) as source:
        monkeypatch.setattr(os, "preadv", spy)
        half = source.read("layers.1", "moe.w1", (slice(None), slice(32, 64), slice(None)))
        assert read == [32 * 48] * 16
        columns = source.read("layers.1", "moe.w2", (slice(4, 6), slice(None), slice(16, 32)))
        assert read[16:] == [96 * 32] * 2  # a drive reads whole rows anyway
        assert same(half, source.read("layers.1", "moe.w1")[:, 32:64])
        assert same(columns, source.read("layers.1", "moe.w2")[4:6, :, 16:32])


@pytest.mark.parametrize("index", [(slice(2, 5), slice(None)), (slice(1, 6), slice(2, 3))])
def test_slices_in_blocks(tmp_path, monkeypatch, index):
    from k3jax.checkpoint import shards

    monkeypatch.setattr(shards, "BLOCK", 40)  # two rows at once
    data = np.arange(7 * 4, dtype=np.float32).reshape(7, 4)
    (tmp_path / "data").write_bytes(b"1234" + data.tobytes())
    out = np.empty_like(data[index])
    with (tmp_path / "data").open("rb") as stream:
        read_into(stream.fileno(), 4, data.shape, index, out)
        assert same(out, data[index])
        with pytest.raises(ValueError, match="ends 4 bytes early"):
            read_into(stream.fileno(), 8, data.shape, (slice(None), slice(None)), data.copy())


def test_what_is_no_checkpoint(tmp_path, linear):
    config = linear.config
    with pytest.raises(ValueError, match="does not exist: a checkpoint directory has"):
        open_checkpoint(tmp_path / "nowhere", config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds neither: .*safetensors.*params/"):
        open_checkpoint(tmp_path / "empty", config)


def test_a_mesh_that_does_not_divide_is_refused_first(k3, tmp_path):
    with pytest.raises(ValueError, match="expert inner width 64 by 128"):
        load_params(tmp_path / "nowhere", k3.config, parallel.make_mesh(4))


def test_the_config_decides_the_names(k3):
    raw = json.loads((k3.directory / "config.json").read_text())
    raw["text_config"]["hidden_size"] = 64
    config = type(k3.config).from_dict(raw)
    with pytest.raises(ValueError, match=r"wrong shape: .*\[512, 128\], not \[512, 64\]"):
        open_checkpoint(k3.directory, config)
