"""Each warning on faked facts, with its remedy; a good machine has none."""

from dataclasses import replace
from pathlib import Path

import pytest

from k3jax import doctor
from k3jax.config import K3Config
from k3jax.doctor import Device, Facts, Wish, warnings_of

MI355X = Device("AMD Instinct MI355X", "gfx950", 270 * 10**9)
H200 = Device("NVIDIA H200", "9.0", 130 * 10**9)
FRACTION = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}
ROCM = Facts(
    versions={"jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.12", "jax-rocm7-plugin": "0.12.0"},
    platform="rocm",
    devices=(MI355X,) * 8,
    rocm="7.2.1-43",
    environment=FRACTION,
    amd_device=True,
    shared_memory=16 << 30,
)
CUDA = replace(
    ROCM,
    versions={"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.12"},
    platform="cuda",
    devices=(H200,),
    rocm=None,
    amd_device=None,
    nvidia_device=True,
)
CPU = Facts(versions={"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}, platform="cpu")
K3 = K3Config.from_file(Path(__file__).parent / "data" / "k3-config.json")


@pytest.mark.parametrize("facts", [ROCM, CUDA, CPU])
def test_a_good_machine_has_no_warnings(facts):
    assert warnings_of(facts, Wish(tp=len(facts.devices) or 1)) == []


def flags(value):
    return FRACTION | {"XLA_FLAGS": f"--other=1 --xla_gpu_enable_command_buffer={value}"}


CASES = {
    "old jax": (replace(CPU, versions={"jax": "0.9.1"}), "JAX 0.9.1 is not", "jax>=0.10.2,<0.13"),
    "new jax": (replace(CPU, versions={"jax": "0.13.0", "flax": "0.13"}), "JAX 0.13.0", "<0.13"),
    "plugin": (
        replace(ROCM, versions={**ROCM.versions, "jax-rocm7-plugin": "0.11.0"}),
        "jax-rocm7-plugin 0.11.0 beside JAX 0.12.0",
        "jax-rocm7-plugin==0.12.0",
    ),
    "flax": (
        replace(ROCM, versions={**ROCM.versions, "flax": "0.12.8"}),
        "flax 0.12.8 does not know JAX 0.12.0",
        "flax>=0.12.12",
    ),
    "closed": (replace(ROCM, amd_device=False), "/dev/kfd", "groups render and video"),
    "no plugin": (replace(CPU, amd_device=True), "no plugin", "k3jax[rocm]"),
    "no cuda": (replace(CPU, nvidia_device=True), "no plugin", "k3jax[cuda]"),
    "hidden": (
        replace(CPU, nvidia_device=True, environment={"JAX_PLATFORMS": "cpu"}),
        "JAX_PLATFORMS=cpu hides it",
        "unset it",
    ),
    "mixed": (
        replace(ROCM, devices=(MI355X, replace(MI355X, kind="AMD Instinct MI350X"))),
        "AMD Instinct MI350X, AMD Instinct MI355X",
        "different experts",
    ),
    "architecture": (
        replace(ROCM, devices=(replace(MI355X, architecture="gfx90a"),)),
        "gfx90a",
        "--decode-backend stock",
    ),
    "capability": (replace(CUDA, devices=(replace(H200, architecture="8.0"),)), "8.0", "9.0"),
    "loops": (replace(ROCM, rocm="7.1.0"), "xla#46952", "=FUSION,CUSTOM_CALL"),
    "loops asked for": (
        replace(ROCM, rocm="7.1.0", environment=flags("FUSION,WHILE")),
        "xla#46952",
        "=FUSION,CUSTOM_CALL",
    ),
    "7.2.0": (replace(ROCM, rocm="7.2.0"), "xla#40405", "install 7.2.1"),
    "off": (replace(CUDA, environment=flags("")), "command buffers are off", "FUSION,CUSTOM_CALL"),
    "collectives": (
        replace(CUDA, environment=flags("FUSION,COLLECTIVES")),
        "collectives in command buffers",
        "take COLLECTIVES out",
    ),
    "fraction": (replace(CUDA, environment={}), "three quarters", "MEM_FRACTION=.95"),
    "numa": (replace(ROCM, numa_balancing=True), "NUMA balancing", "numa_balancing"),
    "shm": (replace(ROCM, shared_memory=64 << 20), "/dev/shm has 64 MiB", "--ipc host"),
}


@pytest.mark.parametrize("name", CASES)
def test_warnings_and_remedies(name):
    facts, what, remedy = CASES[name]
    (found,) = warnings_of(facts, Wish(tp=2))
    assert what in found
    assert remedy in found


@pytest.mark.parametrize(
    ("facts", "rocm", "environment"),
    [
        (replace(ROCM, devices=(replace(MI355X, architecture="gfx942"),)), "7.1.0", FRACTION),
        (ROCM, "7.1.0", flags("FUSION,CUSTOM_CALL")),
    ],
    ids=("another card", "no loops"),
)
def test_known_crashes_are_told_only_where_they_happen(facts, rocm, environment):
    assert warnings_of(replace(facts, rocm=rocm, environment=environment)) == []


def test_a_model_that_does_not_fit():
    assert warnings_of(ROCM, Wish(K3, 8)) == []
    (found,) = warnings_of(CUDA, Wish(K3, 8))
    assert "the weights take 205.1 GB on each of 8 ranks, JAX has 130.0 GB" in found
    (found,) = warnings_of(ROCM, Wish(K3, 7))
    assert "choose another --tp" in found


def test_ranks_that_cannot_be_are_told_on_any_platform(golden):
    tiny = K3Config.from_file(golden / "k3-tiny-a")
    assert warnings_of(replace(CPU, device_count=2), Wish(tiny, 2)) == []
    few, undivided = warnings_of(replace(CPU, device_count=1), Wish(tiny, 8))
    assert "--tp 8 needs 8 devices, JAX sees 1 here" in few
    assert "expert inner width 64 by 256" in undivided
    assert "choose another --tp" in undivided


def test_the_command_looks_at_this_machine(capsys, monkeypatch, golden):
    monkeypatch.setattr(doctor, "gather", lambda: replace(CPU, amd_device=True))
    assert doctor.main([str(golden / "k3-tiny-a"), "--tp", "2"]) == 1
    text = capsys.readouterr().out
    assert "platform  cpu" in text
    assert "package   jax 0.10.2" in text
    assert text.endswith("1 warning\n")
    monkeypatch.undo()
    facts = doctor.gather()
    assert facts.platform == "cpu"
    assert facts.device_count == 8
    assert facts.versions["jax"] == facts.versions["jaxlib"]
    assert doctor.main(["nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
