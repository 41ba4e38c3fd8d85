"""KDA decode: replaying what was accepted, running the new rows, and touching nothing else."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_SLOT, KdaRows, kda_commit, kda_decode
from pallas_kernels.case_inputs import EPS, bind
from pallas_kernels.cases import select

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret"]
COSTLY = ["reference"]  # test_kda_decode_pallas.py compares each form of the kernel with it


def i32(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("impl", COSTLY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("kda_decode"))
def test_matches_float64(case, dtype, impl):
    arrays, bound = made(case, dtype), case.dims["lower_bound"]
    out, cache, flags, health = jax.device_get(jax.jit(bind(case, impl))(arrays))
    assert out.dtype == cache.conv.dtype == cache.pending.key.dtype == dtype
    assert not np.asarray(flags).any()
    assert health == 0
    given, new = wide(arrays), wide(cache)
    terms = case.dims["K"] + case.dims["Q"] + case.dims["T"]
    rows = case.dims["T"]
    for index, slot in enumerate(given["slots"]):
        request = jax.tree.map(lambda leaf, index=index: leaf[index], given["rows"])
        start = given["starts"][index]
        window, state = oracles.kda_replay(given["cache"], slot, start, given["accepted"][index])
        expected, _, _, updates = oracles.kda_tokens(
            request, window, state, given["weights"], bound, EPS
        )
        assert_close(out[index], expected, dtype, terms)
        assert_close(cache.state[slot], state, jnp.float32, terms)
        _, key, _, decay, _ = oracles.kda_inputs(request, window, given["weights"], bound)
        at = slot, (start + np.arange(rows)) % new.conv.shape[1]
        np.testing.assert_array_equal(new.conv[at], request.qkv)
        assert_close(new.pending.key[at], key, dtype, 16)
        assert_close(new.pending.decay[at], decay, jnp.float32, 16)
        assert_close(new.pending.update[at], updates, dtype, terms)


@pytest.fixture(scope="module")
def small():
    """Three requests of four rows, compiled once: (ops by impl, arrays)."""
    case = select("kda_decode", "tiny")[0]
    return {impl: jax.jit(bind(case, impl)) for impl in IMPLS}, made(case, jnp.float32)


def ring_rows_of(cache, slots, starts, first, last):
    """Which ring rows hold positions starts + first .. starts + last - 1: bool[S, R]."""
    rows = np.zeros(cache.conv.shape[:2], bool)
    for slot, start in zip(np.asarray(slots), np.asarray(starts), strict=True):
        rows[slot, np.arange(start + first, start + last) % rows.shape[1]] = True
    return rows


def expand(rows, leaf):
    return rows.reshape(*rows.shape, *[1] * (leaf.ndim - 2))


@pytest.mark.parametrize("impl", IMPLS)
class TestAccepted:
    def test_is_clamped(self, small, impl):
        ops, arrays = small
        beyond = ops[impl]({**arrays, "accepted": i32(-3, 99, 4)})
        assert_same_bits(beyond, ops[impl]({**arrays, "accepted": i32(0, 4, 4)}))

    def test_zero_keeps_the_old_state_bit_for_bit(self, small, impl):
        ops, arrays = small
        _, cache, _, _ = ops[impl]({**arrays, "accepted": i32(0, 0, 0)})
        old = arrays["cache"]
        assert_same_bits(cache.state, old.state)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_rejected_suffix_never_reaches_the_state(self, small, impl, count):
        ops, arrays = small
        given = {**arrays, "accepted": i32(count, count, count)}
        cache, slots, starts = (arrays[name] for name in ("cache", "slots", "starts"))
        replayed = ring_rows_of(cache, slots, starts, -count, 0)
        window = ring_rows_of(cache, slots, starts, -3, 0)
        poisoned = dataclasses.replace(
            cache,
            conv=jnp.where(expand(window, cache.conv), cache.conv, jnp.nan),
            pending=jax.tree.map(
                lambda leaf: jnp.where(expand(replayed, leaf), leaf, jnp.nan), cache.pending
            ),
        )
        clean, stained = (ops[impl]({**given, "cache": held}) for held in (cache, poisoned))
        assert_same_bits(stained[0], clean[0])
        assert_same_bits(stained[1].state, clean[1].state)

    def test_rows_beside_the_step_stay(self, impl):
        case = select("kda_decode", "tiny")[1]
        arrays = made(case, jnp.float32)
        old, starts, slots = arrays["cache"], arrays["starts"], arrays["slots"]
        _, cache, _, _ = jax.jit(bind(case, impl))(arrays)
        written = ring_rows_of(old, slots, starts, 0, case.dims["T"])
        for leaf, before in zip(
            jax.tree.leaves((cache.conv, cache.pending)),
            jax.tree.leaves((old.conv, old.pending)),
            strict=True,
        ):
            kept = ~expand(written, leaf)
            assert_same_bits(jnp.where(kept, leaf, 0), jnp.where(kept, before, 0))


@pytest.mark.parametrize("impl", COSTLY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_verifying_equals_decoding_one_by_one(impl, dtype):
    """Four rows at once, of which each request accepts another number, then two more: the same
    outputs and state as the accepted rows one at a time."""
    case = select("kda_decode", "tiny")[0]
    arrays = made(case, dtype)
    slots, weights, rows = arrays["slots"], arrays["weights"], arrays["rows"]
    op = jax.jit(partial(kda_decode, lower_bound=-5.0, norm_eps=EPS, impl=impl))
    commit = jax.jit(kda_commit)
    begin = arrays["starts"]
    start = commit(arrays["cache"], slots, begin, arrays["accepted"])
    verified, cache, _, _ = op(rows, weights, start, slots, begin, i32(0, 0, 0))
    accepted = i32(1, 3, 4)
    after, cache, _, _ = op(rows, weights, cache, slots, begin + accepted, accepted)
    final = commit(cache, slots, begin + accepted + 2, i32(2, 2, 2))

    verified, after, final, rows = jax.device_get((verified, after, final, rows))
    paths = [[*range(count), 0, 1] for count in np.asarray(accepted)]
    outputs, single, before = [], start, i32(0, 0, 0)
    for step in range(6):
        # Each request walks its own path; one that has arrived runs on and is not looked at.
        step_rows = [path[step] if step < len(path) else 0 for path in paths]
        one = jax.tree.map(lambda leaf, at=step_rows: leaf[np.arange(3), at][:, None], rows)
        out, single, _, _ = op(one, weights, single, slots, begin + step, before)
        before = i32(1, 1, 1)
        outputs.append(np.asarray(out[:, 0]))
        end = begin + step + 1
        committed = jax.device_get(commit(single, slots, end, before))
        for request, path in enumerate(paths):
            if step == len(path) - 1:
                slot = slots[request]
                state = wide(committed.state[slot])
                assert_close(final.state[slot], state, jnp.float32, case.dims["K"])
                windows = (
                    oracles.kda_window(x.conv[slot], end[request]) for x in (final, committed)
                )
                assert_same_bits(*windows)
    for request, count in enumerate(np.asarray(accepted)):
        expected = np.concatenate([verified[request, :count], after[request, :2]])
        actual = np.stack(outputs)[: count + 2, request]
        assert_close(actual, wide(expected), dtype, case.dims["K"])


@pytest.mark.parametrize("impl", IMPLS)
def test_other_slots_are_not_written(small, impl):
    ops, arrays = small
    used = np.asarray(arrays["slots"])
    poisoned = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, jnp.nan).at[used].set(leaf[used]), arrays["cache"]
    )
    out, cache, flags, _ = ops[impl]({**arrays, "cache": poisoned})
    assert np.isfinite(out).all()
    assert not np.asarray(flags).any()
    others = np.setdiff1d(np.arange(len(arrays["cache"].state)), used)
    assert len(others) > 1
    assert_same_bits(
        jax.tree.map(lambda leaf: leaf[others], cache),
        jax.tree.map(lambda leaf: leaf[others], poisoned),
    )


def nan_request(rows, index):
    return jax.tree.map(lambda leaf: leaf.at[index].set(jnp.nan), rows)


@pytest.mark.parametrize("impl", IMPLS)
class TestNullSlot:
    @pytest.mark.parametrize("null", [(0, 0), (-1, -7)])
    def test_padding_stays_in_it(self, small, impl, null):
        ops, arrays = small
        clean, clean_cache, _, _ = ops[impl](arrays)
        slots = i32(null[0], arrays["slots"][1], null[1])
        cache = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), arrays["cache"])
        rows = nan_request(nan_request(arrays["rows"], 0), 2)
        out, cache, flags, health = ops[impl](
            {**arrays, "rows": rows, "cache": cache, "slots": slots}
        )
        assert not np.asarray(out[::2]).any()
        assert_same_bits(out[1], clean[1])
        assert not np.asarray(flags).any()
        assert health == 0
        live = int(slots[1])
        cache, clean_cache, old = jax.device_get((cache, clean_cache, arrays["cache"]))
        for slot in range(1, len(cache.state)):
            source = clean_cache if slot == live else old
            assert_same_bits(*(jax.tree.map(lambda x, s=slot: x[s], t) for t in (cache, source)))

    def test_a_slot_beyond_the_cache_is_null_and_sets_its_bit(self, small, impl):
        ops, arrays = small
        clean, _, _, _ = ops[impl](arrays)
        slots = arrays["slots"].at[1].set(len(arrays["cache"].state))
        out, cache, flags, health = ops[impl]({**arrays, "slots": slots})
        assert health == BIT_SLOT
        assert not np.asarray(out[1]).any()
        assert_same_bits(out[::2], clean[::2])
        assert not np.asarray(flags).any()
        unused = arrays["slots"][1]
        assert_same_bits(cache.state[unused], arrays["cache"].state[unused])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("field", ["qkv", "decay", "beta", "gate"])
def test_a_nan_row_flags_its_request_alone(small, impl, field):
    ops, arrays = small
    clean, _, _, _ = ops[impl](arrays)
    leaf = getattr(arrays["rows"], field).at[1, -1, 0].set(jnp.nan)
    out, _, flags, _ = ops[impl](
        {**arrays, "rows": dataclasses.replace(arrays["rows"], **{field: leaf})}
    )
    assert np.asarray(flags).tolist() == [False, True, False]
    assert_same_bits(out[::2], clean[::2])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_in_the_state_flags_its_request(small, impl):
    ops, arrays = small
    state = arrays["cache"].state.at[arrays["slots"][2], 0, 3, 5].set(jnp.nan)
    cache = dataclasses.replace(arrays["cache"], state=state)
    assert np.asarray(ops[impl]({**arrays, "cache": cache})[2]).tolist() == [False, False, True]


@pytest.mark.parametrize("impl", COSTLY)
def test_a_donated_cache_gives_the_same_bits(small, impl):
    ops, arrays = small
    expected = ops[impl](arrays)
    op = partial(kda_decode, lower_bound=-5.0, norm_eps=EPS, impl=impl)
    donating = jax.jit(op, donate_argnums=2)
    copy = jax.tree.map(jnp.copy, arrays["cache"])
    names = ("slots", "starts", "accepted")
    actual = donating(arrays["rows"], arrays["weights"], copy, *(arrays[name] for name in names))
    assert copy.state.is_deleted()
    assert_same_bits(actual, expected)


def test_commit_alone():
    case = select("kda_decode", "tiny")[0]
    arrays = made(case, jnp.float32)
    slots = i32(3, 0, 2)
    old = arrays["cache"]
    cache = jax.jit(kda_commit)(old, slots, i32(9, 9, 9), i32(2, 4, 0))
    _, state = oracles.kda_replay(wide(old), 3, 9, 2)
    assert_close(cache.state[3], state, jnp.float32, 64)
    others = np.array([0, 1, 2, 4, 5])
    assert_same_bits(cache.state[others], old.state[others])
    assert_same_bits((cache.conv, cache.pending), (old.conv, old.pending))


def test_more_rows_than_the_cache_keeps_are_refused(small):
    _, arrays = small
    rows = KdaRows(*(jnp.tile(leaf, (1, 2, 1)) for leaf in jax.tree.leaves(arrays["rows"])))
    with pytest.raises(ValueError, match="8 rows a request, the cache keeps 4"):
        kda_decode(**{**arrays, "rows": rows}, lower_bound=-5.0, norm_eps=EPS, impl="reference")
