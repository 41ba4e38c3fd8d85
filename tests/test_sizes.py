"""What the released models weigh, against the published numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from k3jax import sizes
from k3jax.config import K3Config

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def k3():
    return K3Config.from_file(DATA / "k3-config.json")


def test_parameters(k3):
    assert sizes.total_parameters(k3) == pytest.approx(2.78e12, rel=1e-3)
    assert sizes.active_parameters(k3) == pytest.approx(104e9, rel=5e-3)


def test_tensors(k3):
    # 497,220 are released; the other 168 are the vision encoder's (6 in each of 27 layers, and 6).
    assert sizes.checkpoint_tensors(k3) == 497_220 - (27 * 6 + 6)


def test_tensors_of_a_real_file(golden):
    import json

    index = json.loads((golden / "k3-tiny-a" / "model.safetensors.index.json").read_text())
    config = K3Config.from_file(golden / "k3-tiny-a")
    assert sizes.checkpoint_tensors(config) == len(index["weight_map"])


def test_bytes_at_rest(k3):
    # The routed experts alone are the 1.45 TB; what is bf16 and f32 comes on top.
    assert sizes.bytes_at_rest(k3, experts_only=True) == pytest.approx(1.45e12, rel=3e-3)
    assert sizes.bytes_at_rest(k3) == pytest.approx(1.56e12, rel=1e-3)
    assert sizes.bytes_per_rank(k3, 1) == sizes.bytes_at_rest(k3)


def test_bytes_of_a_request(k3):
    assert sizes.kda_state_bytes(k3) == pytest.approx(434e6, rel=1e-3)
    assert sizes.latent_bytes(k3, 1) == 24 * 576 * 2


def test_kimi_linear_is_48b_with_3b_active():
    config = K3Config.from_file(DATA / "kimi-linear-48b-config.json")
    assert sizes.total_parameters(config) == pytest.approx(48e9, rel=0.03)
    assert sizes.active_parameters(config) == pytest.approx(3e9, rel=0.05)


def test_the_packed_bytes_are_the_reported_ones(golden):
    import jax

    from k3jax.params import packed_shapes

    for model in ("k3-tiny-a", "kimi-linear-tiny"):
        config = K3Config.from_file(golden / model)
        for tp in (1, 2):
            shapes = jax.tree.leaves(packed_shapes(config, tp))
            # Whole arrays count once here and once per rank there: compare one rank at TP 1.
            packed = sum(shape.size * shape.dtype.itemsize for shape in shapes)
            if tp == 1:
                assert packed == sizes.bytes_at_rest(config)
            assert packed <= tp * sizes.bytes_per_rank(config, tp)


def test_the_command_says_where_it_fits():
    command = [sys.executable, "-m", "k3jax.config", str(DATA / "k3-config.json")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "93 = 69 KDA + 24 MLA" in text
    assert "2,779.5 B" in text
    assert "104.2 B active" in text
    assert "434.1 MB" in text
    tp8 = next(line for line in text.splitlines() if line.startswith("TP 8"))
    tp16 = next(line for line in text.splitlines() if line.startswith("TP 16"))
    assert "MI355X (288 GB): 82.9 GB left" in tp8
    assert "H200 (141 GB): does NOT fit" in tp8
    assert "NOT" not in tp16


def test_a_small_model_is_told_in_smaller_units(golden):
    text = "\n".join(sizes.report_lines(K3Config.from_file(golden / "k3-tiny-a")))
    assert "3.6 M, of which 2.2 M active" in text
    assert "at rest      4.6 MB" in text
    assert "KDA state 163.8 kB" in text
    assert "expert inner width 64 by 256 (8 x 32)" in text


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["/nowhere"], 1)])
def test_the_command_refuses_politely(arguments, code, capsys):
    from k3jax.config import main

    assert main(arguments) == code
    output = capsys.readouterr()
    assert "usage" in output.out or "does not exist" in output.err
