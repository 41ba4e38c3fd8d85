"""Compiled linear, attention residuals, router and MXFP4 kernels on every measured shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import select

from .oracles import DTYPES, assert_close, assert_same_bits

LARGEST = 8 << 30  # bytes of a case's arrays


def measured(op, phase="decode"):
    found = []
    for case in select(op, "gpu", phase):
        arrays = jax.eval_shape(lambda case=case: inputs(case, jnp.bfloat16))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
        if size <= LARGEST:
            found.append(pytest.param(case, id=str(case)))
    return found


def widened(arrays, dtype):
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == dtype else leaf, arrays
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [*measured("linear"), *measured("moe_mxfp4"), *measured("moe_mxfp4", "prefill")],
)
def test_matches_the_reference_in_float32(case, dtype):
    arrays = jax.jit(lambda: inputs(case, dtype))()
    op = jax.jit(lambda arrays: jax.tree.leaves(bind(case, "pallas")(arrays))[0])  # not the health
    expected = jax.tree.leaves(jax.jit(bind(case, "reference"))(widened(arrays, dtype)))[0]
    terms = case.dims["K"] if case.op == "linear" else case.dims["Z"] + case.dims["I"]
    assert_close(op(arrays), np.asarray(expected, np.float64), dtype, terms)
    assert_same_bits(op(arrays), op(arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*measured("attn_res"), *measured("attn_res", "prefill")])
def test_attn_res_matches_the_reference_in_float32(case, dtype):
    arrays = jax.jit(lambda: inputs(case, dtype))()
    arrays["blocks"] = arrays["blocks"].at[case.dims["count"] :].set(jnp.nan)
    actual = jax.jit(bind(case, "pallas"))(arrays)
    expected = jax.jit(bind(case, "reference"))(widened(arrays, dtype))
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, np.asarray(wanted, np.float64), dtype, case.dims["D"])
    assert_same_bits(jax.jit(bind(case, "pallas"))(arrays), actual)


LAUNCHES = [
    case for op in ("linears", "choose_beside", "mla_absorb", "mla_values") for case in measured(op)
]
LAUNCHES += measured("choose_beside", "prefill")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_of_a_layer_match_the_reference_in_float32(case, dtype):
    arrays = jax.jit(lambda: inputs(case, dtype))()
    actual = jax.tree.leaves(jax.jit(bind(case, "pallas"))(arrays))
    expected = jax.tree.leaves(jax.jit(bind(case, "reference"))(widened(arrays, dtype)))
    terms = case.dims.get("K") or case.dims["L"]
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, np.asarray(wanted, np.float64), dtype, terms)


@pytest.mark.gpu
@pytest.mark.parametrize("case", measured("route"))
def test_route_matches_the_reference(case):
    """In float32: in bf16 two orders of summation may part at a tie."""
    arrays = jax.jit(lambda: inputs(case, jnp.float32))()
    experts, weights = jax.jit(bind(case, "pallas"))(arrays)
    expected = jax.jit(bind(case, "reference"))(arrays)
    np.testing.assert_array_equal(experts, expected[0])
    assert_close(weights, np.asarray(expected[1], np.float64), jnp.float32, case.dims["D"])
