"""Converted checkpoints: the same weights, every fault told, saved from arrays or from files."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from k3jax import parallel
from k3jax.checkpoint import by_group, load_params, open_checkpoint, save_orbax
from k3jax.checkpoint.orbax import save_group
from k3jax.config import K3Config
from k3jax.convert import convert
from k3jax.logical import group_params, groups


def ignore(group, size):
    pass


@pytest.fixture(scope="module")
def converted(golden, tmp_path_factory):
    """kimi-linear-tiny, converted once."""
    target = tmp_path_factory.mktemp("orbax") / "linear"
    convert(golden / "kimi-linear-tiny", target, "orbax", ignore)
    return target


@pytest.fixture
def damaged(converted, tmp_path):
    """A copy to damage."""
    return shutil.copytree(converted, tmp_path / "damaged")


def refusal(directory, config=None):
    with pytest.raises(ValueError) as error:
        open_checkpoint(directory, config or K3Config.from_file(directory))
    return str(error.value).split("\n- ")[1:]


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
    )


@pytest.mark.parametrize(("model", "tp"), [("k3-tiny-a", 2), ("kimi-linear-tiny", 4)])
def test_loads_the_same_packed_params(golden, tmp_path, model, tp):
    source, target = golden / model, tmp_path / model
    convert(source, target, "orbax", ignore)
    config = K3Config.from_file(target)
    mesh = parallel.make_mesh(tp)
    ours, theirs = load_params(target, config, mesh), load_params(source, config, mesh)
    assert equal(ours, theirs)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, ours, theirs)
    assert all(jax.tree.leaves(same))


def test_names_are_logical_and_dtypes_are_the_specs(converted):
    config = K3Config.from_file(converted)
    with open_checkpoint(converted, config) as source:
        for name, spec in group_params(config, "layers.1").items():
            metadata = json.loads((converted / "params/layers.1" / name / ".zarray").read_text())
            assert tuple(metadata["shape"]) == spec.shape
            assert source.read("layers.1", name).shape == spec.shape


def test_every_fault_is_told(damaged):
    params = damaged / "params"
    shutil.rmtree(params / "layers.3")
    shutil.rmtree(params / "layers.0" / "kda.q")
    (params / "layers.0" / "kda.k" / ".zarray").write_text("{")
    shutil.copytree(params / "layers.1" / "kda.q", params / "layers.1" / "stranger")
    (params / "layers.1" / "kda.o" / "0.0").unlink()
    (params / "layers.2" / "moe.w1" / "0.0.0").write_bytes(b"short")
    shutil.rmtree(params / "layers.2" / "attn_norm")
    shutil.copytree(params / "layers.2" / "kda.a_log", params / "layers.2" / "attn_norm")
    assert sorted(refusal(damaged)) == sorted(
        [
            "missing group: params/layers.3",
            "missing array: layers.0.kda.q",
            "broken array: layers.0.kda.k: JSONDecodeError Expecting property name enclosed in "
            "double quotes: line 1 column 2 (char 1) in .zarray",
            "unknown array: layers.1.stranger",
            "broken chunk: layers.1.kda.o: 0.0 should have 8192 bytes: no file",
            "broken chunk: layers.2.moe.w1: 0.0.0 should have 16384 bytes: 5",
            "wrong dtype: layers.2.attn_norm: <f4, not bf16",
            "wrong shape: layers.2.attn_norm: [4], not [64]",
        ]
    )


def test_another_config_is_refused(converted):
    config = dataclasses.replace(K3Config.from_file(converted), vocab_size=200)
    lines = refusal(converted, config)
    assert lines == [
        f"wrong shape: ends.{name}: [192, 64], not [200, 64]" for name in ("embed", "head")
    ]


def test_an_unfinished_conversion_says_how_to_go_on(damaged):
    file = damaged / "conversion.json"
    file.write_text(file.read_text().replace("true", "false"))
    with pytest.raises(ValueError, match=r"did not finish: run `python -m k3jax.convert .* again"):
        open_checkpoint(damaged, K3Config.from_file(damaged))
    file.write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        open_checkpoint(damaged, K3Config.from_file(damaged))


def logical_arrays(directory):
    """Every array of a converted checkpoint by its full name."""
    config = K3Config.from_file(directory)
    arrays = {}
    with open_checkpoint(directory, config) as source:
        for group in groups(config):
            for name in group_params(config, group):
                full = name if group == "ends" else f"{group}.{name}"
                arrays[full] = source.read(group, name)
    return config, arrays


def test_save_from_arrays(converted, tmp_path):
    config, arrays = logical_arrays(converted)
    arrays = {name: jax.numpy.asarray(array) for name, array in arrays.items()}
    raw = json.loads((converted / "config.json").read_text())
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tiktoken.model").write_text("ranks")
    (tmp_path / "files" / "notes.bin").write_text("other")
    target = tmp_path / "saved"
    save_orbax(target, raw, by_group(arrays, config), files_from=tmp_path / "files")
    assert (target / "tiktoken.model").read_text() == "ranks"
    assert not (target / "notes.bin").exists()
    mesh = parallel.make_mesh(1)
    saved = load_params(target, K3Config.from_file(target), mesh)
    assert equal(saved, load_params(converted, config, mesh))
    here = str(tmp_path).encode()
    assert not [file for file in target.rglob("*") if file.is_file() and here in file.read_bytes()]


def test_save_refuses_other_arrays(converted, tmp_path):
    config, arrays = logical_arrays(converted)
    raw = json.loads((converted / "config.json").read_text())
    ends = {name: arrays[name] for name in ("embed", "head")}
    wrong = [("ends", ends | {"embed": arrays["embed"][1:], "extra": arrays["norm"]})]
    with pytest.raises(ValueError, match=r"unknown array: ends.extra\n") as error:
        save_orbax(tmp_path / "a", raw, wrong)
    assert "missing array: ends.norm" in str(error.value)
    assert "bfloat16[191, 64], not bfloat16[192, 64]" in str(error.value)
    every = list(by_group(arrays, config))
    with pytest.raises(ValueError, match=r"groups \['layers.4'\] are missing"):
        save_orbax(tmp_path / "b", raw, every[:-1])
    with pytest.raises(ValueError, match="'ends' is unknown or comes twice"):
        save_orbax(tmp_path / "c", raw, [every[0], every[0]])
    assert not (tmp_path / "b" / "config.json").exists()


def test_what_a_killed_save_left_is_removed(converted, tmp_path):
    _, arrays = logical_arrays(converted)
    leftover = tmp_path / "params" / "ends.orbax-checkpoint-tmp-7"
    leftover.mkdir(parents=True)
    (leftover / "part").write_text("part")
    save_group(tmp_path, "ends", {name: arrays[name] for name in ("embed", "head", "norm")})
    assert [entry.name for entry in (tmp_path / "params").iterdir()] == ["ends"]
