"""Why a step is not specialized: every string, their order, and which layers could be."""

from pathlib import Path

import pytest

from k3jax.config import K3Config
from k3jax.decode.faults import Fault
from k3jax.decode.kinds import layer_kinds
from k3jax.decode.reasons import REASONS, BatchRows, step_reason

BUILDS = ((1, 4), (4, 2))
CASES = [
    (BatchRows((1,)), None),
    (BatchRows((1, 1, 1, 1)), None),
    (BatchRows((4, 4)), None),
    (BatchRows(), "no requests"),
    (BatchRows(prefilling=(4, 4)), "prefill"),
    (BatchRows(prefilling=(1,)), "prefill"),
    (BatchRows((1,), (1,)), "prefill"),
    (BatchRows((4, 1)), "not uniform"),
    (BatchRows((2, 2)), "unbuilt width"),
    (BatchRows((4, 4, 4)), "unbuilt width"),
    (BatchRows((1,) * 5), "unbuilt width"),
]


@pytest.mark.parametrize(("batch", "reason"), CASES)
def test_reasons(batch, reason):
    assert step_reason(batch, BUILDS, True) == reason
    assert step_reason(batch, BUILDS, False) == (reason or "cache not bound")
    assert step_reason(batch, (), True) in (
        "no requests",
        "prefill",
        "not uniform",
        "unbuilt width",
    )


@pytest.mark.parametrize("refused", ["backend", "platform", "weights"])
def test_what_lasts_comes_first(refused):
    for batch, _ in CASES:
        assert step_reason(batch, BUILDS, False, refused=refused) == refused


def test_every_reason_is_a_label():
    found = {step_reason(batch, BUILDS, bound) for batch, _ in CASES for bound in (True, False)}
    assert found - {None} == set(REASONS) - {"backend", "platform", "weights"}
    assert not any(set(reason) & set('/"\n') for reason in REASONS)


def test_kinds_of_layers(golden):
    kinds = layer_kinds(K3Config.from_file(golden / "k3-tiny-a"))
    assert kinds == ("stock", "whole", "whole", "ffn", "whole", "whole", "ffn")
    assert set(layer_kinds(K3Config.from_file(golden / "kimi-linear-tiny"))) == {"stock"}
    full = layer_kinds(K3Config.from_file(Path(__file__).parents[1] / "data" / "k3-config.json"))
    assert [full.count(kind) for kind in ("stock", "whole", "ffn")] == [1, 68, 24]


def test_faults_are_read():
    assert Fault.parse("1:20:wait") == Fault(1, 20, "wait")
    assert Fault.parse("0:1:nonfinite").kind == "nonfinite"
    for text in ("", "1:2", "1:2:none", "1:0:wait", "-1:2:wait", "a:2:wait", "1:2:wait:3"):
        with pytest.raises(ValueError, match="RANK:STEP:BIT"):
            Fault.parse(text)
