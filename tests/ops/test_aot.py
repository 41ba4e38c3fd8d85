"""The AMD compile check: kernels by name in the lowered module, and the rules of the table."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import select

KERNELS = {
    "linear": {"linear_skinny"},
    "attn_res": {"attn_res"},
    "route": {"linear_skinny", "route_top_k"},
    "moe_mxfp4": {"moe_mxfp4_up", "moe_mxfp4_down"},
}
GOOD = {
    "kernel": "k", "arch": "gfx942", "spills": 0, "scratch": 0, "lds": 65536, "mfma": 1,
}  # fmt: skip


@pytest.mark.parametrize("op", KERNELS)
def test_the_kernels_are_in_the_lowered_program(op):
    case = select(op, "gpu", "decode")[0]
    shapes = jax.eval_shape(lambda: inputs(case, jnp.bfloat16))
    kernels = aot.triton_kernels(aot.lower_rocm(bind(case, "pallas"), shapes))
    assert {kernel.name for kernel in kernels} == KERNELS[op]


def test_rules_of_the_table():
    decode = frozenset({"decode"})
    assert aot.faults("linear", decode, [GOOD]) == []
    assert "spills" in aot.faults("linear", decode, [{**GOOD, "scratch": 4}])[0]
    assert aot.faults("linear", frozenset(), [{**GOOD, "scratch": 4}]) == []
    assert "LDS" in aot.faults("linear", decode, [{**GOOD, "lds": 65537}])[0]
    assert "matrix" in aot.faults("linear", decode, [{**GOOD, "mfma": 0}])[0]
    assert aot.faults("attn_res", decode, [{**GOOD, "mfma": 0}]) == []
    errors = aot.faults("attn_res", decode, [{"kernel": "k", "arch": "gfx950", "error": "no"}])
    assert errors == ["k on gfx950: no"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra 'aot'")
@pytest.mark.parametrize("op", ["linear", "attn_res"])
def test_a_decode_case_compiles_for_amd_without_a_gpu(op):
    case = select(op, "gpu", "decode")[0]
    with aot.AmdCompiler() as compiler:
        rows = aot.compile_case(case, jnp.bfloat16, compiler, aot.ARCHS)
    assert [row["arch"] for row in rows] == list(aot.ARCHS)
    assert aot.faults(case.op, case.tags, rows) == []
    assert all(row["load_bytes"] == 16 for row in rows)
