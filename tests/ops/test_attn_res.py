"""Attention residuals."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attn_res, attn_res_mix, attn_res_weights
from pallas_kernels.case_inputs import EPS, bind, inputs, options
from pallas_kernels.cases import select

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("attn_res"))
def test_matches_float64(case, dtype, impl):
    arrays = made(case, dtype)
    normed, part = jax.jit(bind(case, impl))(arrays)
    assert normed.dtype == part.dtype == dtype
    expected = oracles.attn_res(**wide(arrays), **options(case))
    assert_close(normed, expected[0], dtype, case.dims["D"])
    assert_close(part, expected[1], dtype, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("attn_res"))
def test_weights_and_mix_for_tracing(case, dtype):
    arrays = {**made(case, dtype), "delta": None}
    _, _, mix, weights = oracles.attn_res(**wide(arrays), **options(case))
    names = ("blocks", "count", "part", "query_norm", "query_proj")
    given = [arrays[name] for name in names]
    actual = jax.jit(partial(attn_res_weights, eps=EPS))(*given)
    count = case.dims["count"]
    assert_close(actual[:, [*range(count), -1]], weights, jnp.float32, case.dims["D"])
    assert not np.asarray(actual[:, count:-1]).any()
    actual = jax.jit(partial(attn_res_mix, eps=EPS))(*given)
    assert actual.dtype == dtype
    assert_close(actual, mix, dtype, case.dims["D"])


def named(*names):
    cases = {str(case): case for case in select("attn_res", "tiny")}
    return [pytest.param(cases[f"attn_res-tiny-{name}"], id=name) for name in names]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", named("k3-blocks0", "k3-blocks2", "k3-wide-blocks0", "k3-wide-blocks2")
)
def test_unused_blocks_are_never_read(case, impl):
    arrays = made(case, jnp.float32)
    op = jax.jit(bind(case, impl))
    clean = op(arrays)
    poisoned = arrays["blocks"].at[case.dims["count"] :].set(jnp.nan)
    assert_same_bits(op({**arrays, "blocks": poisoned}), clean)


@pytest.mark.parametrize("case", named("k3-wide-blocks2", "wide-odd"))
def test_a_row_of_many_is_the_same_in_any_company(case):
    arrays = made(case, jnp.bfloat16)
    whole = jax.jit(bind(case, "interpret"))(arrays)
    rows = np.arange(case.dims["W"])[::-1][1:]  # one less, the other way round
    fewer = {**arrays, "blocks": arrays["blocks"][:, rows]}
    fewer |= {name: arrays[name][rows] for name in ("part", "delta")}
    assert_same_bits(
        jax.jit(bind(case, "interpret"))(fewer), jax.tree.map(lambda leaf: leaf[rows], whole)
    )


@pytest.mark.parametrize(
    ("rows", "kernels"), [(64, {"attn_res_products", "attn_res_mix"}), (65, {"attn_res_rows"})]
)
def test_the_number_of_rows_chooses_the_kernel(rows, kernels):
    case = select("attn_res", "tiny")[0]
    wide = dataclasses.replace(case, dims={**case.dims, "W": rows})
    shapes = jax.eval_shape(partial(inputs, wide, jnp.bfloat16))
    jaxpr = jax.make_jaxpr(bind(wide, "pallas"))(shapes)
    assert set(re.findall(r"\bname=(attn_res\w+)", str(jaxpr))) == kernels


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", named("k3-blocks0", "k3-wide-blocks0"))
def test_no_blocks_mean_the_partial_sum_itself(case, impl):
    arrays = made(case, jnp.float32)
    normed, part = bind(case, impl)(arrays)
    assert_close(normed, oracles.rms(wide(part), wide(arrays["norm"]), EPS), jnp.float32, 128)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["part", "delta", "blocks"])
@pytest.mark.parametrize("case", named("k3-blocks2", "k3-wide-blocks2"))
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_row_that_is_not_finite_stays_alone_and_is_seen(value, case, name, impl):
    arrays = dict(made(case, jnp.float32))
    lead = (0,) if name == "blocks" else ()
    arrays[name] = arrays[name].at[(*lead, 2, 7)].set(value)
    normed, _ = jax.jit(bind(case, impl))(arrays)
    finite = np.isfinite(normed).all(axis=1)
    np.testing.assert_array_equal(finite, np.arange(case.dims["W"]) != 2)


def test_misfit_shapes_are_refused():
    ones = jnp.ones(8)
    with pytest.raises(ValueError, match=r"\(3, 4, 8\), \(5, 8\)"):
        attn_res(
            jnp.zeros((3, 4, 8)), 0, jnp.zeros((5, 8)), ones, ones, ones, eps=EPS, impl="reference"
        )
