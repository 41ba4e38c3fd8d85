"""The KDA decode kernel against the plain-jnp op: interpreted here, compiled with -m gpu."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_SLOT, Unnormed, kda_decode
from pallas_kernels.aot import lower_rocm
from pallas_kernels.case_inputs import EPS, bind, inputs
from pallas_kernels.cases import Case, select
from pallas_kernels.kda_decode_pallas import decode_tiles, kda_decode_pallas

BOUNDED, SOFTPLUS = -5.0, None
# Relative norm of the difference from the reference: tf32 products in bf16 mode.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 4e-3}
# Accepted counts below, at, inside and beyond [0, Q]; a null row, a negative and a foreign slot.
SLOTS = np.array([3, 1, 7, 4, 6, 2, 0, -1, 8], np.int32)
ACCEPTED = np.array([0, 1, 3, 4, 9, -2, 2, 4, 4], np.int32)
FORMS = {
    "block": (jnp.bfloat16, BOUNDED, 3, 4),
    "steps": (jnp.float32, BOUNDED, 3, 4),
    "steps-softplus": (jnp.bfloat16, SOFTPLUS, 2, 2),
    "steps-one": (jnp.float32, BOUNDED, 1, 1),
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
    if isinstance(out, Unnormed):
        out, wanted = out.normed(EPS), wanted.normed(EPS)
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
    exact = dtype == jnp.float32
    tiles = decode_tiles(new, (16, 8), heads=18, exact=exact, lower_bound=lower_bound, norm=True)
    assert tiles.form == name.split("-")[0]
    arrays = prepared(case, dtype)
    cache = compare(case, dtype, arrays, "interpret", broken=(2,))
    before = arrays["cache"]
    # Nothing accepted: state and window as they were, bit for bit; nor is a stranger touched.
    for slot in (3, 2, 5):
        np.testing.assert_array_equal(cache.state[slot], before.state[slot])
    # A row that was not accepted does not reach the state, though it is NaN.
    assert np.all(np.isfinite(cache.state[7]))


def test_rejected_suffix_leaves_no_trace():
    dtype, lower_bound, new, pending = FORMS["block"]
    case = tiny(new, pending, lower_bound)
    arrays = prepared(case, dtype)
    run = jax.jit(bind(case, "interpret"))
    clean = run(arrays)
    # Request 1 has slot 1 and replays the one row before its start.
    cache, start = arrays["cache"], int(arrays["starts"][1])
    ring = cache.conv.shape[1]
    rejected = np.zeros((8, ring), bool)
    rejected[1] = np.arange(ring) != (start - 1) % ring
    pending = jax.tree.map(
        lambda leaf: jnp.where(rejected.reshape(8, ring, *[1] * (leaf.ndim - 2)), jnp.nan, leaf),
        cache.pending,
    )
    dirty = run({**arrays, "cache": dataclasses.replace(cache, pending=pending)})
    np.testing.assert_array_equal(clean[0][1], dirty[0][1])
    np.testing.assert_array_equal(clean[1].state[1], dirty[1].state[1])


@pytest.mark.parametrize("name", ["block", "steps"])
def test_strips_of_values_before_the_norm(name):
    dtype, lower_bound, new, pending = FORMS[name]
    arrays = prepared(tiny(new, pending, lower_bound), dtype)
    known = {"lower_bound": lower_bound, "norm_eps": EPS, "norm": False}
    exact = dtype == jnp.float32
    tiles = decode_tiles(new, (16, 8), heads=18, exact=exact, lower_bound=lower_bound, norm=False)
    tiles = dataclasses.replace(tiles, strip=8)
    run = partial(kda_decode_pallas, **known, interpret=True, tiles=tiles)
    got = jax.jit(run)(**arrays)
    wanted = jax.jit(partial(kda_decode, **known, impl="reference"))(**arrays)
    assert got[0].rows.dtype == wanted[0].rows.dtype == dtype
    assert got[0].squares.shape == (9, new, 2, 2)
    np.testing.assert_array_equal(got[2], wanted[2])
    sane = np.arange(9) != 2
    assert_close(got[0].rows[sane], wanted[0].rows[sane], TOLERANCE[dtype])
    sums = [np.sum(side[0].squares, axis=-1)[sane] for side in (got, wanted)]
    assert_close(*sums, TOLERANCE[dtype])
    normed = jax.jit(bind(tiny(new, pending, lower_bound), "reference"))(arrays)[0]
    assert_close(got[0].normed(EPS)[sane], normed[sane], 2 * TOLERANCE[dtype])
    kept = np.array([1, 2, 3, 4, 5, 6])
    for leaf, target in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        assert_close(leaf[kept], target[kept], TOLERANCE[dtype])


def test_slot_beyond_the_cache_sets_its_bit():
    dtype, lower_bound, new, pending = FORMS["steps-one"]
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
