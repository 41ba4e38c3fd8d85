"""Conversion keeps every bit, both ways, and goes on after a kill."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from editable import Editable

from k3jax import convert as module
from k3jax.checkpoint.loading import open_checkpoint
from k3jax.config import K3Config
from k3jax.convert import convert, main
from k3jax.logical import group_params, groups
from k3jax.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def ignore(group, size):
    pass


def tree(directory):
    """Every file below with its bytes and modification time."""
    files = (file for file in directory.rglob("*") if file.is_file())
    return {
        str(file.relative_to(directory)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in files
    }


def test_there_and_back_is_bit_exact(either, tmp_path):
    (either.directory / "tokenizer_config.json").write_text('{"a": 1}')
    convert(either.directory, tmp_path / "orbax", "orbax", ignore)
    convert(tmp_path / "orbax", tmp_path / "hf", "hf", ignore)
    before, after = either.all(), Editable(tmp_path / "hf").all()
    assert before.keys() == after.keys()
    for name, (dtype, values) in before.items():
        assert after[name][0] == dtype, name
        assert after[name][1].shape == values.shape, name
        assert after[name][1].tobytes() == values.tobytes(), name
    for name in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (either.directory / name).read_bytes()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    size = sum(values.nbytes for _, values in before.values())
    assert index["metadata"]["total_size"] == size


def test_an_export_of_orbax_comes_back_bit_exact(tmp_path):
    """Packed experts too; the tokenizer's files are made once and kept from then on."""
    source = ROOT / "checkpoints" / "k3-tiny"
    for name, before, to in (("a", source, "orbax"), ("b", "a", "hf"), ("c", "b", "orbax")):
        convert(tmp_path / before, tmp_path / name, to, ignore)
    convert(tmp_path / "c", tmp_path / "d", "hf", ignore)
    config = K3Config.from_file(source)
    packed = 0
    with open_checkpoint(tmp_path / "a", config) as a, open_checkpoint(tmp_path / "c", config) as c:
        for group in groups(config):
            for name in group_params(config, group):
                first, second = a.read(group, name), c.read(group, name)
                assert (first.dtype, first.shape) == (second.dtype, second.shape), name
                assert first.tobytes() == second.tobytes(), name
                packed += first.nbytes if first.dtype == np.uint8 else 0
    assert (
        packed == 6 * 16 * 3 * 64 * 96 * 17 // 32
    )  # layers, experts, matrices, 4.25 bits a weight
    for name in ("tokenizer.json", "tokenizer_config.json", "tiktoken.model"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "d" / name).read_bytes()
    assert Tokenizer.from_directory(tmp_path / "d").encode("text") == list(b"text")


def test_the_safetensors_library_reads_the_export(linear, tmp_path):
    from safetensors.numpy import load_file

    convert(linear.directory, tmp_path / "orbax", "orbax", ignore)
    convert(tmp_path / "orbax", tmp_path / "hf", "hf", ignore)
    file = next((tmp_path / "hf").glob("model-00002-*.safetensors"))
    read = load_file(file)
    for name, values in read.items():
        assert values.tobytes() == linear.values(name).tobytes()


def test_f32_that_bf16_cannot_hold_stays_f32(linear, tmp_path):
    name = "model.layers.0.self_attn.q_conv1d.weight"
    file = linear.files["model.safetensors"]
    file[name] = ("F32", np.full((64, 1, 4), 1 / 3, np.float32))
    linear.write()
    convert(linear.directory, tmp_path / "orbax", "orbax", ignore)
    convert(tmp_path / "orbax", tmp_path / "hf", "hf", ignore)
    dtype, values = Editable(tmp_path / "hf").all()[name]
    assert (dtype, values.tobytes()) == ("F32", file[name][1].tobytes())


class Killed(Exception):
    """Stands for a kill between two groups."""


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_goes_on_where_it_stopped(linear, tmp_path, to):
    source = linear.directory
    if to == "hf":
        convert(source, tmp_path / "orbax", "orbax", ignore)
        source = tmp_path / "orbax"
    target = tmp_path / "target"

    def stop(group, size):
        if group == "layers.1":
            raise Killed

    with pytest.raises(Killed):
        convert(source, target, to, stop)
    half = tree(target)
    groups = []
    convert(source, target, to, lambda group, size: groups.append(group))
    assert groups == ["ends", *(f"layers.{layer}" for layer in range(5))]
    whole = tree(target)
    kept = {name for name in half if "conversion.json" not in name}
    assert kept
    assert all(half[name] == whole[name] for name in kept)
    convert(source, target, to, ignore)  # a third time there is nothing to do


SLOW = """
import sys, time
from k3jax import checkpoint, convert
from k3jax.checkpoint import huggingface
read = huggingface.HuggingFaceCheckpoint.read
def slow(self, group, name, index=None):
    time.sleep(0.02)
    return read(self, group, name, index)
huggingface.HuggingFaceCheckpoint.read = slow
sys.exit(convert.main(sys.argv[1:]))
"""


def test_goes_on_after_kill_9(linear, tmp_path):
    target = tmp_path / "target"
    command = [sys.executable, "-c", SLOW, str(linear.directory), str(target)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(target.glob("params/layers.1.orbax-checkpoint-tmp*/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = {name: each for name, each in tree(target).items() if name.startswith("params/ends/")}
    assert saved
    convert(linear.directory, target, "orbax", ignore)
    assert not list(target.glob("params/*tmp*"))
    whole = tree(target)
    assert all(whole[name] == each for name, each in saved.items())
    convert(target, tmp_path / "hf", "hf", ignore)
    after = Editable(tmp_path / "hf").all()
    assert all(after[name][1].tobytes() == v.tobytes() for name, (_, v) in linear.all().items())


def test_other_sources_and_full_targets_are_refused(linear, tmp_path):
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="not to 'gguf'"):
        convert(linear.directory, target, "gguf", ignore)
    with pytest.raises(ValueError, match=r"is a Hugging Face checkpoint already: .* --to orbax"):
        convert(linear.directory, target, "hf", ignore)
    target.mkdir()
    (target / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and no earlier conversion"):
        convert(linear.directory, target, "orbax", ignore)
    with pytest.raises(ValueError, match="is not a directory"):
        convert(linear.directory, target / "mine.txt", "orbax", ignore)
    (target / "mine.txt").unlink()
    convert(linear.directory, target, "orbax", ignore)
    with pytest.raises(ValueError, match=r"is an Orbax checkpoint already: .* --to hf"):
        convert(target, tmp_path / "again", "orbax", ignore)
    linear.values("model.norm.weight")[0] += 1
    linear.write()
    with pytest.raises(ValueError, match="begun from other files"):
        convert(linear.directory, target, "orbax", ignore)


def test_a_broken_source_leaves_the_target_alone(linear, tmp_path):
    del linear.files["model.safetensors"]["model.norm.weight"]
    linear.write()
    with pytest.raises(ValueError, match=r"missing tensor: model.norm.weight"):
        convert(linear.directory, tmp_path / "target", "orbax", ignore)
    assert not (tmp_path / "target").exists()


def test_nan_scales_are_refused_together(k3, tmp_path):
    start = "language_model.model.layers"
    names = [f"{start}.{i}.block_sparse_moe.experts.{i}.w2.weight_scale" for i in (1, 6)]
    for name in names:
        k3.values(name)[0, 0] = 255
    k3.write()
    with pytest.raises(ValueError) as error:
        convert(k3.directory, tmp_path / "target", "orbax", ignore)
    assert all(f"NaN scale: {name}" in str(error.value) for name in names)
    assert not (tmp_path / "target" / "params" / "layers.1").exists()


def test_command_line(linear, tmp_path, capsys):
    assert main([str(linear.directory), str(tmp_path / "target")]) == 0
    assert "100%" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "other")]) == 1
    (tmp_path / "file").touch()
    assert main([str(linear.directory), str(tmp_path / "file" / "target")]) == 1
    assert "error: " in capsys.readouterr().err
    assert module.__doc__ is not None
