"""Every fault of a checkpoint is found before it is loaded, and all of them are told together."""

import json

import ml_dtypes
import numpy as np
import pytest

from k3jax import parallel
from k3jax.checkpoint import load_params, open_checkpoint
from k3jax.checkpoint.report import fold
from k3jax.checkpoint.shards import INDEX

K3 = "language_model.model."
NORM = f"{K3}layers.2.input_layernorm.weight"
EXPERT = f"{K3}layers.2.block_sparse_moe.experts.3.w1."
A_LOG = f"{K3}layers.4.self_attn.A_log"
FIRST, SECOND, THIRD = (f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3))


def refusal(checkpoint):
    """The error's lines."""
    with pytest.raises(ValueError) as error:
        open_checkpoint(checkpoint.directory, checkpoint.config)
    return str(error.value).split("\n- ")[1:]


def drop(checkpoint):
    del checkpoint.files[checkpoint.file_of(NORM)][NORM]


def add(checkpoint):
    checkpoint.files[FIRST]["stranger"] = ("F32", np.zeros(2, np.float32))


def misshape(checkpoint):
    file = checkpoint.files[checkpoint.file_of(EXPERT + "weight_packed")]
    file[EXPERT + "weight_packed"] = ("U8", np.zeros((48, 64), np.uint8))


def retype(checkpoint):
    file = checkpoint.files[checkpoint.file_of(NORM)]
    file[NORM] = ("F32", file[NORM][1].astype(np.float32))


def duplicate(checkpoint):
    checkpoint.files[THIRD][NORM] = checkpoint.all()[NORM]


def lengthen_a_log(checkpoint):
    checkpoint.values(A_LOG)[20] = 1e-30


FAULTS = {
    drop: [f"missing tensor: {NORM}"],
    add: [f"unknown tensor: stranger: in {FIRST}"],
    misshape: [f"wrong shape: {EXPERT}weight_packed: [48, 64], not [64, 48]"],
    retype: [f"wrong dtype: {NORM}: F32, not BF16"],
    lengthen_a_log: [f"nonzero tail: {A_LOG}: only the first 8 values are heads"],
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_alone(k3, fault):
    fault(k3)
    k3.write()
    assert refusal(k3) == FAULTS[fault]


def test_duplicated_in_two_shards(k3):
    index = k3.index
    duplicate(k3)
    k3.write()
    k3.write_index(index)
    assert refusal(k3) == [f"duplicated tensor: {NORM}: in {FIRST} and in {THIRD}"]


def test_duplicated_in_one_header(k3):
    file = k3.directory / FIRST
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = json.dumps(NORM) + ":" + json.dumps(header[NORM])
    text = data[8 : 8 + length].rstrip(b" ")[:-1] + f",{entry}}}".encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert refusal(k3) == [f"duplicated tensor: {NORM}: twice in {FIRST}"]


def test_truncated_shard(k3):
    file = k3.directory / SECOND
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 1)
    (line,) = refusal(k3)
    assert line.startswith(f"truncated shard: {SECOND}: {size - 1} bytes of {size}, 1 of ")


def test_shard_cut_before_its_a_log(k3):
    file = k3.directory / SECOND
    with file.open("r+b") as stream:
        stream.truncate(8 + int.from_bytes(stream.read(8), "little"))
    (line,) = refusal(k3)
    count = len(k3.files[SECOND])
    assert line.endswith(f"{count} of {count} tensors are not whole")


def test_bytes_after_the_end(k3):
    with (k3.directory / SECOND).open("ab") as stream:
        stream.write(b"xyz")
    assert refusal(k3) == [f"broken shard: {SECOND}: 3 bytes more than its header tells"]


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (lambda data: b"", "it claims 0 bytes of header, the file has 0"),
        (lambda data: data[:100], "the file has 100"),
        (lambda data: b"\xff" * 8 + data[8:], "it claims 18446744073709551615 bytes of header"),
        (lambda data: data[:8] + b"[" + data[9:], "JSONDecodeError"),
        (lambda data: data.replace(b'"U8"', b'"Q8"', 1), "dtype 'Q8' of"),
        (lambda data: data.replace(b'"BF16"', b'"U8"  ', 1), "do not fit U8"),
        (lambda data: data.replace(b"offsets", b"offsetz", 1), "KeyError 'data_offsets'"),
        (lambda data: data.replace(b"[0,", b"[1,", 1), "do not follow byte 0"),
    ],
)
def test_broken_header(k3, damage, shown):
    file = k3.directory / THIRD
    file.write_bytes(damage(file.read_bytes()))
    lines = refusal(k3)
    assert lines[0].startswith(f"broken header: {THIRD}: ")
    assert shown in lines[0]
    assert any(line.startswith("missing tensor: language_model.lm_head") for line in lines)


def test_missing_shard(k3):
    (k3.directory / THIRD).unlink()
    lines = refusal(k3)
    assert lines[0].startswith(f"missing shard: {THIRD}: the index puts ")
    assert "missing tensor: language_model.lm_head.weight" in lines


def test_missing_index(k3):
    (k3.directory / INDEX).unlink()
    assert refusal(k3) == [f"missing index: {INDEX}: there are 3 shards"]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_broken_index(k3, text):
    (k3.directory / INDEX).write_text(text)
    (line,) = refusal(k3)
    assert line.startswith(f"broken index: {INDEX}: ")


def test_stale_index(k3):
    index = k3.index
    index[NORM] = SECOND
    del index["language_model.lm_head.weight"]
    index["language_model.model.gone"] = FIRST
    k3.write_index(index)
    (k3.directory / "model-00009.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    assert refusal(k3) == [
        "stale index: model-00009.safetensors: it does not name this shard",
        f"stale index: {NORM}: it is in {FIRST}, not {SECOND}",
        f"stale index: language_model.model.gone: it is not in {FIRST}",
        f"stale index: language_model.lm_head.weight: {THIRD} has it, the index has not",
    ]


def test_several_faults_together(k3):
    other = f"{K3}layers.3.self_attn.q_b_proj.weight"
    add(k3)
    misshape(k3)
    drop(k3)
    lengthen_a_log(k3)
    k3.files[k3.file_of(other)][other] = ("BF16", np.zeros((1, 2), ml_dtypes.bfloat16))
    k3.write()
    with (k3.directory / THIRD).open("ab") as stream:
        stream.write(b"x")
    lines = refusal(k3)
    assert len(lines) == 6
    wanted = [*FAULTS[add], *FAULTS[drop], *FAULTS[misshape], *FAULTS[lengthen_a_log]]
    assert set(wanted) < set(lines)
    assert f"wrong shape: {other}: [1, 2], not [384, 48]" in lines


def test_nan_scales_are_found_while_streaming(k3):
    names = [
        f"{K3}layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight_scale"
        for layer, expert, matrix in ((2, 3, "w1"), (2, 3, "w2"), (2, 15, "w3"), (6, 0, "w1"))
    ]
    for name in names:
        k3.values(name)[-1, -1] = 255
    k3.write()
    steps = []
    with pytest.raises(ValueError) as error:
        load_params(k3.directory, k3.config, parallel.make_mesh(2), progress=steps.append)
    lines = str(error.value).split("\n- ")[1:]
    assert sorted(lines) == sorted(
        f"NaN scale: {name}: a scale of 255 is NaN in MXFP4" for name in names
    )
    assert [step.group for step in steps] == ["ends", "layers.0", "layers.1"]


def test_many_experts_share_a_line(k3):
    for file in k3.files.values():
        for name in [name for name in file if name.endswith(".w2.weight_scale")]:
            del file[name]
    k3.write()
    assert refusal(k3) == [
        f"missing tensor: {K3}layers.{layer}.block_sparse_moe.experts.[0-15].w2.weight_scale "
        "(16 tensors)"
        for layer in range(1, 7)
    ]


def test_fold():
    names = [f"layers.{i}.a" for i in range(20) if i != 7]
    names += [f"layers.{i}.experts.{e}.b" for i in range(10) for e in range(30)]
    names += ["layers.3.c", "head"]
    assert fold(names) == [
        ("layers.[0-6,8-19].a", 19),
        ("layers.[0-9].experts.[0-29].b", 300),
        ("layers.3.c", 1),
        ("head", 1),
    ]
