"""The chunked KDA prefill kernels against the plain-jnp op."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import lower_rocm
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import Case, select

# bf16 operands of every product, a decay that spans a chunk: relative norms.
OUT, STATE = 1e-2, 2e-3


def tiny(lower_bound=-5.0):
    dims = {"B": 2, "T": 130, "H": 1, "K": 32, "V": 16, "lower_bound": lower_bound}
    return Case("kda_prefill", "tiny", frozenset(), dims)


def difference(got, wanted):
    got, wanted = (np.asarray(leaf, np.float64) for leaf in (got, wanted))
    assert np.all(np.isfinite(got))
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def compare(case, arrays, impl):
    out, cache, flags, health = jax.jit(bind(case, impl))(arrays)
    wanted, right, right_flags, right_health = jax.jit(bind(case, "reference"))(arrays)
    assert difference(out, wanted) < OUT
    assert difference(cache.state, right.state) < STATE
    np.testing.assert_array_equal(cache.conv, right.conv)
    np.testing.assert_array_equal(flags, right_flags)
    assert health == right_health
    return out


def test_interpreted_with_nan_in_the_padding():
    """A fresh request of full length, and one that goes on and ends inside its second chunk."""
    case = tiny()
    arrays = inputs(case, jnp.bfloat16, seed=2)
    lengths = np.asarray(arrays["lengths"])
    assert 64 < lengths[1] < 128
    padding = (jnp.arange(130)[None] >= lengths[:, None])[..., None]
    rows = jax.tree.map(lambda leaf: jnp.where(padding, jnp.nan, leaf), arrays["rows"])
    out = compare(case, {**arrays, "rows": rows}, "interpret")
    assert not np.any(np.asarray(out[1, lengths[1] :], np.float32))


@pytest.mark.parametrize(
    ("dtype", "lower_bound"), [(jnp.float32, -5.0), (jnp.bfloat16, None)], ids=["f32", "softplus"]
)
def test_what_the_kernel_cannot_is_refused(dtype, lower_bound):
    case = dataclasses.replace(tiny(lower_bound))
    shapes = jax.eval_shape(partial(inputs, case, dtype))
    with pytest.raises(NotImplementedError, match="reference"):
        jax.eval_shape(bind(case, "interpret"), shapes)


def test_lowers_for_rocm_under_its_names():
    case = tiny()
    shapes = jax.eval_shape(partial(inputs, case, jnp.bfloat16))
    text = lower_rocm(bind(case, "pallas"), shapes).as_text()
    assert 'name = "kda_prefill_chunk"' in text
    assert 'name = "kda_prefill_scan"' in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", select("kda_prefill", "gpu"), ids=str)
def test_compiled_cases(case):
    compare(case, inputs(case, jnp.bfloat16, seed=5), "pallas")
