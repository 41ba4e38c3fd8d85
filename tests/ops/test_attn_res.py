"""Attention residuals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attn_res, attn_res_mix, attn_res_weights
from pallas_kernels.case_inputs import EPS, bind, options
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


@pytest.mark.parametrize("impl", IMPLS)
def test_unused_blocks_are_never_read(impl):
    for case in select("attn_res", "tiny")[:2]:
        arrays = made(case, jnp.float32)
        op = jax.jit(bind(case, impl))
        clean = op(arrays)
        poisoned = arrays["blocks"].at[case.dims["count"] :].set(jnp.nan)
        assert_same_bits(op({**arrays, "blocks": poisoned}), clean)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_blocks_mean_the_partial_sum_itself(impl):
    case = select("attn_res", "tiny")[0]
    arrays = made(case, jnp.float32)
    normed, part = bind(case, impl)(arrays)
    assert_close(normed, oracles.rms(wide(part), wide(arrays["norm"]), EPS), jnp.float32, 128)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["part", "delta", "blocks"])
def test_a_nan_row_stays_alone_and_is_seen(name, impl):
    case = select("attn_res", "tiny")[1]
    arrays = made(case, jnp.float32)
    lead = (0,) if name == "blocks" else ()
    arrays[name] = arrays[name].at[(*lead, 2, 7)].set(jnp.nan)
    normed, _ = jax.jit(bind(case, impl))(arrays)
    finite = np.isfinite(normed).all(axis=1)
    np.testing.assert_array_equal(finite, np.arange(case.dims["W"]) != 2)


def test_misfit_shapes_are_refused():
    ones = jnp.ones(8)
    with pytest.raises(ValueError, match=r"\(3, 4, 8\), \(5, 8\)"):
        attn_res(
            jnp.zeros((3, 4, 8)), 0, jnp.zeros((5, 8)), ones, ones, ones, eps=EPS, impl="reference"
        )
