"""The AMD compile check: kernels by name in the lowered module, and the rules of the table."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import CASES, select

KERNELS = {
    "linear": {"linear_skinny"},
    "linears": {"linears"},
    "attn_res": {"attn_res_products", "attn_res_mix"},
    "route": {"linear_parts", "linear_sum", "route_top_k"},
    "choose_beside": {"choose_beside"},
    "moe_mxfp4": {"moe_mxfp4_up", "moe_mxfp4_down"},
    "moe_mono": {"moe_mono"},
    "kda_decode": {"kda_decode"},
    "kda_prefill": {f"kda_prefill_{part}" for part in ("project", "chunk", "walk", "output")},
    "mla_absorb": {"mla_absorb"},
    "mla_decode": {"mla_decode", "mla_combine"},
    "mla_prefill": {"mla_prefill"},
    "mla_values": {"mla_values"},
}
GOOD = {
    "kernel": "k", "arch": "gfx942", "spills": 0, "scratch": 0, "lds": 65536, "mfma": 1,
}  # fmt: skip


def test_every_measured_op_has_its_kernels_named_here():
    assert set(KERNELS) == {case.op for case in CASES if "gpu" in case.tags}


@pytest.mark.parametrize("op", KERNELS)
def test_the_kernels_are_in_the_lowered_program(op):
    case = select(op, "gpu", "k3-tp8")[0]
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
    assert aot.faults("no_products", decode, [{**GOOD, "mfma": 0}]) == []
    summing = {**GOOD, "kernel": "attn_res_rows", "mfma": 0}
    assert aot.faults("attn_res", decode, [summing]) == []
    assert "matrix" in aot.faults("attn_res", decode, [summing, {**GOOD, "mfma": 0}])[0]
    errors = aot.faults("no_products", decode, [{"kernel": "k", "arch": "gfx950", "error": "no"}])
    assert errors == ["k on gfx950: no"]


COMPILED = [  # a form of every kernel that decoding uses
    "linear-k3-tp8-kda_in_proj-w8",
    "linear-k3-tp8-o_proj_unnormed-w8",
    "linear-k3-tp8-shared_gate_up-w8",
    "linears-k3-tp8-experts-w8",
    "choose_beside-k3-tp8-shared_down-w8",
    "mla_absorb-k3-tp8-heads-w8",
    "mla_values-k3-tp8-heads-w8",
    "attn_res-k3-blocks8-w8",
    "route-k3-w8",
    "moe_mxfp4-k3-tp8-w8",
    "kda_decode-k3-tp8-b8-q1-unnormed",
    "kda_decode-k3-tp8-b8-q8-unnormed",
    "mla_decode-k3-tp8-b1-q8-context8192",
]
STREAMING = {
    "linear",
    "linears",
    "attn_res",
    "mla_absorb",
    "mla_values",
    "moe_mxfp4",
}  # a lane reads 16 bytes at once


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra 'aot'")
@pytest.mark.parametrize("name", COMPILED)
def test_a_decode_case_compiles_for_amd_without_a_gpu(name):
    case = next(case for case in CASES if str(case) == name)
    with aot.AmdCompiler() as compiler:
        rows = aot.compile_case(case, jnp.bfloat16, compiler, aot.ARCHS)
    assert {row["arch"] for row in rows} == set(aot.ARCHS)
    assert aot.faults(case.op, case.tags, rows) == []
    if case.op == "moe_mxfp4":  # gfx950 has an instruction for it
        assert all((row["fp4"] > 0) == (row["arch"] == "gfx950") for row in rows)
    if case.op in STREAMING:
        assert all(row["load_bytes"] == 16 for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra 'aot'")
def test_many_rows_of_attn_res_compile_for_amd_without_spills():
    [case] = [case for case in CASES if str(case) == "attn_res-k3-blocks8-w1024"]
    with aot.AmdCompiler() as compiler:
        rows = aot.compile_case(case, jnp.bfloat16, compiler, aot.ARCHS)
    assert [row["kernel"] for row in rows] == ["attn_res_rows"] * len(aot.ARCHS)
    assert aot.faults(case.op, frozenset({"decode"}), rows) == []
