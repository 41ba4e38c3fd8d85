"""The KDA decode kernel against the plain-jnp op: interpreted here, compiled with -m gpu."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_SLOT
from pallas_kernels.aot import lower_rocm
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import Case, select
from pallas_kernels.kda_decode_pallas import decode_tiles

BOUNDED, SOFTPLUS = -5.0, None
# Relative norm of the difference from the reference: tf32 products in bf16 mode.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 4e-3}
# Accepted counts below, at, inside and beyond [0, Q]; a null row, a negative and a foreign slot.
SLOTS = np.array([3, 1, 7, 4, 6, 2, 0, -1, 8], np.int32)
ACCEPTED = np.array([0, 1, 3, 4, 9, -2, 2, 4, 4], np.int32)
FORMS = {
    "wy": (jnp.bfloat16, BOUNDED, 3, 4),
    "steps": (jnp.float32, BOUNDED, 3, 4),
    "steps-softplus": (jnp.bfloat16, SOFTPLUS, 2, 2),
    "pair": (jnp.float32, BOUNDED, 1, 1),
    "pair-softplus": (jnp.bfloat16, SOFTPLUS, 1, 1),
}


def tiny(new, pending, lower_bound):
    dims = {"B": 9, "T": new, "S": 8, "Q": pending, "H": 2, "K": 8, "V": 16}
    return Case("kda_decode", "tiny", frozenset(), {**dims, "lower_bound": lower_bound})


def prepared(case, dtype):
    """Random arguments with every boundary of slots and counts, a NaN in one request."""
    arrays = inputs(case, dtype, seed=3)
    qkv = arrays["rows"].qkv.at[2, -1, 5].set(jnp.nan)
    rows = dataclasses.replace(arrays["rows"], qkv=qkv)
    return {**arrays, "rows": rows, "slots": jnp.asarray(SLOTS), "accepted": jnp.asarray(ACCEPTED)}


def assert_close(got, wanted, tolerance):
    got, wanted = (np.asarray(leaf, np.float64) for leaf in (got, wanted))
    assert np.all(np.isfinite(got))
    assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


def compare(case, dtype, arrays, impl, broken=()):
    """Check everything the op returns; requests in `broken` only for their flag and pending."""
    out, cache, flags, health = jax.jit(bind(case, impl))(arrays)
    wanted, right, right_flags, right_health = jax.jit(bind(case, "reference"))(arrays)
    np.testing.assert_array_equal(flags, right_flags)
    assert health == right_health
    size = arrays["cache"].state.shape[0]
    slots = np.asarray(arrays["slots"])
    sane = [row for row in range(len(slots)) if row not in broken]
    assert_close(out[np.array(sane)], wanted[np.array(sane)], TOLERANCE[dtype])
    # The null slot is anybody's; every other slot's contents are defined.
    kept = np.array([slot for slot in range(1, size) if slot not in slots[list(broken)]])
    for leaf, target in zip(jax.tree.leaves(cache), jax.tree.leaves(right), strict=True):
        assert_close(leaf[kept], target[kept], TOLERANCE[dtype])
    return cache


@pytest.mark.parametrize("name", FORMS)
def test_interpreted_forms(name):
    dtype, lower_bound, new, pending = FORMS[name]
    case = tiny(new, pending, lower_bound)
    tiles = decode_tiles(new, pending, 8, 16, exact=dtype == jnp.float32, lower_bound=lower_bound)
    assert tiles.form == name.split("-")[0]
    arrays = prepared(case, dtype)
    cache = compare(case, dtype, arrays, "interpret", broken=(2,))
    before = arrays["cache"]
    # Nothing accepted: state and window as they were, bit for bit; nor is a stranger touched.
    for slot in (3, 2, 5):
        np.testing.assert_array_equal(cache.state[slot], before.state[slot])
        np.testing.assert_array_equal(cache.conv[slot], before.conv[slot])
    # A row that was not accepted does not reach the state, though it is NaN.
    assert np.all(np.isfinite(cache.state[7]))


def test_rejected_suffix_leaves_no_trace():
    dtype, lower_bound, new, pending = FORMS["wy"]
    case = tiny(new, pending, lower_bound)
    arrays = prepared(case, dtype)
    run = jax.jit(bind(case, "interpret"))
    clean = run(arrays)
    rejected = jnp.arange(pending) >= 1
    held = arrays["cache"].pending
    poisoned = jax.tree.map(
        lambda leaf: jnp.where(
            rejected.reshape(1, -1, *[1] * (leaf.ndim - 2))
            & (jnp.arange(8) == 1).reshape(-1, *[1] * (leaf.ndim - 1)),
            jnp.nan,
            leaf,
        ),
        held,
    )
    cache = dataclasses.replace(arrays["cache"], pending=poisoned)
    dirty = run({**arrays, "cache": cache})
    np.testing.assert_array_equal(clean[0][1], dirty[0][1])
    np.testing.assert_array_equal(clean[1].state[1], dirty[1].state[1])
    np.testing.assert_array_equal(clean[1].conv[1], dirty[1].conv[1])


def test_slot_beyond_the_cache_sets_its_bit():
    dtype, lower_bound, new, pending = FORMS["pair"]
    case = tiny(new, pending, lower_bound)
    arrays = prepared(case, dtype)
    health = jax.jit(bind(case, "interpret"))(arrays)[3]
    assert health == BIT_SLOT


def test_lowers_for_rocm_under_its_name():
    case = tiny(3, 4, BOUNDED)
    shapes = jax.eval_shape(partial(inputs, case, jnp.bfloat16))
    assert 'name = "kda_decode"' in lower_rocm(bind(case, "pallas"), shapes).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("case", select("kda_decode", "gpu"), ids=str)
def test_compiled_cases(case, dtype):
    compare(case, dtype, inputs(case, dtype, seed=5), "pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_compiled_forms(name):
    dtype, lower_bound, new, pending = FORMS[name]
    case = tiny(new, pending, lower_bound)
    compare(case, dtype, prepared(case, dtype), "pallas", broken=(2,))
