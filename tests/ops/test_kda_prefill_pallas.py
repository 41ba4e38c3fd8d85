"""The chunked KDA prefill kernels against the plain-jnp op."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import lower_rocm
from pallas_kernels.case_inputs import bind, inputs, options
from pallas_kernels.cases import Case, select
from pallas_kernels.kda_prefill_pallas import kda_prefill_pallas, prefill_tiles

# bf16 operands of every product, a decay that spans a chunk: relative norms.
OUT, STATE = 1e-2, 2e-3


def tiny(lower_bound=-5.0):
    dims = {"B": 2, "T": 130, "H": 1, "K": 32, "V": 16, "lower_bound": lower_bound}
    return Case("kda_prefill", "tiny", frozenset(), dims)


def difference(got, wanted):
    got, wanted = (np.asarray(leaf, np.float64) for leaf in (got, wanted))
    assert np.all(np.isfinite(got))
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def compare(case, arrays, impl, op=None):
    out, cache, flags, health = jax.jit(op or bind(case, impl))(arrays)
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


@pytest.mark.parametrize("bias", [None, -12.0])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 16), (16, 32)])
def test_a_walk_in_segments(key_dim, value_dim, bias):
    """Of five, the shorter request fills four; the other goes on from its slot's state.

    With decays so weak that the state outlasts all segments, too.
    """
    case = tiny()
    case = dataclasses.replace(case, dims={**case.dims, "K": key_dim, "V": value_dim})
    tiles = prefill_tiles(case.dims["V"], exact=False, platform="portable")
    tiles = dataclasses.replace(tiles, programs=10, leap_programs=99, segment_chunks=1)
    arrays = inputs(case, jnp.bfloat16, seed=4)
    arrays["fresh"] = ~arrays["fresh"]
    if bias is not None:
        weights = arrays["weights"]
        weak = jnp.full_like(weights.dt_bias, bias)
        arrays["weights"] = dataclasses.replace(weights, dt_bias=weak)
    static = {**options(case), "interpret": True, "tiles": tiles}
    compare(case, arrays, "interpret", lambda arrays: kda_prefill_pallas(**arrays, **static))


IMPLS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("impl", IMPLS)
class TestHardDecays:
    """In bf16; in float32 the op's own tests have them."""

    def test_the_strongest_bounded_decay(self, impl):
        case = tiny()
        arrays = inputs(case, jnp.bfloat16, seed=3)
        bias = jnp.full_like(arrays["weights"].dt_bias, 12.0)
        weights = dataclasses.replace(arrays["weights"], dt_bias=bias)
        compare(case, {**arrays, "weights": weights}, impl)

    def test_repeated_keys_without_decay(self, impl):
        """The powers of the triangular matrix would grow as binomials."""
        case = tiny()
        arrays = inputs(case, jnp.bfloat16, seed=3)
        rows = arrays["rows"]
        same = jnp.broadcast_to(rows.qkv[:, :1], rows.qkv.shape)
        rows = dataclasses.replace(rows, qkv=same, beta=jnp.full_like(rows.beta, 20.0))
        bias = jnp.full_like(arrays["weights"].dt_bias, -30.0)
        weights = dataclasses.replace(arrays["weights"], dt_bias=bias)
        compare(case, {**arrays, "rows": rows, "weights": weights}, impl)

    def test_unbounded_decays(self, impl):
        """From none at all to thousands in a row, mixed."""
        case = tiny(None)
        arrays = inputs(case, jnp.bfloat16, seed=3)
        rows = arrays["rows"]
        rows = dataclasses.replace(rows, decay=jnp.sign(rows.decay) * rows.decay**2 * 50)
        compare(case, {**arrays, "rows": rows}, impl)


def test_lowers_for_rocm_under_its_names():
    case = tiny()
    shapes = jax.eval_shape(partial(inputs, case, jnp.bfloat16))
    text = lower_rocm(bind(case, "pallas"), shapes).as_text()
    for kernel in ("project", "chunk", "walk", "output"):
        assert f'name = "kda_prefill_{kernel}"' in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", select("kda_prefill", "gpu"), ids=str)
def test_compiled_cases(case):
    compare(case, inputs(case, jnp.bfloat16, seed=5), "pallas")
