"""The notebooks' helpers that need no model: kernels, tools, and tables of text."""

import importlib.util
import re

import jax.numpy as jnp
import pytest

from k3jax.explore import kernels
from k3jax.explore.tools import run_call
from pallas_kernels.cases import select
from pallas_kernels.linear_tile_pallas import LinearTiles

(CASE,) = [case for case in select("linear", "tiny", "decode") if case.name == "tiny-k3-in_proj"]


def test_every_implementation_is_tried():
    outcomes = kernels.try_implementations(CASE, jnp.float32)
    assert [outcome.impl for outcome in outcomes] == ["reference", "interpret"]
    assert all(outcome.error < 1e-6 and outcome.milliseconds > 0 for outcome in outcomes)
    rounded = kernels.try_implementations(CASE, jnp.bfloat16)
    assert all(1e-4 < outcome.error < 1e-2 for outcome in rounded)


def test_tiles_do_not_change_the_result():
    tiles = [kernels.default_tiles(CASE), LinearTiles(32, 64, 2, 1)]
    assert max(kernels.tiles_agree(CASE, tiles, jnp.float32)) < 1e-6
    assert kernels.describe(tiles[1]) == "32 x 64, 2 warps"


def test_work_of_a_case():
    arrays, result = kernels.shapes(CASE)
    assert arrays["weight"].shape == (1064, 128)
    assert result.shape == (5, 1064)
    assert kernels.linear_operations(CASE) == 2 * 5 * 128 * 1064


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra 'aot'")
def test_amd_resources():
    (row,) = kernels.amd_resources(CASE, [LinearTiles(16, 64, 1, 1)], ["gfx942"])
    assert row["tile"] == "16 x 64, 1 warps"
    assert row["arch"] == "gfx942"
    assert row["vgprs"] > 0


def test_a_missing_compiler_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'k3jax\[aot\]'"):
        kernels.amd_resources(CASE, [])


def test_a_table_lines_up():
    rows = [{"a": 1, "b": "x"}, {"a": 1000}]
    assert kernels.table(rows, ("a", "b")) == "   a  b\n   1  x\n1000  -"


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", '{"a": 2}', "error: .*missing.*"),
        ("add", '{"a": 2, "b"', "error: .*delimiter.*"),
        ("none", "", "error: there is no tool 'none'"),
    ],
)
def test_calls_are_run_or_answered_with_what_is_wrong(name, arguments, content):
    call = {"id": "call_1", "function": {"name": name, "arguments": arguments}}
    message = run_call(call, {"add": lambda a, b: a + b})
    assert re.fullmatch(content, message.pop("content"))
    assert message == {"role": "tool", "tool_call_id": "call_1"}
