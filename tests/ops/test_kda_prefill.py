"""KDA prefill: chunks equal the token-by-token recurrence, whatever the decay and the cut."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_SLOT, KdaRows, kda_commit, kda_decode, kda_prefill
from pallas_kernels.case_inputs import EPS, bind
from pallas_kernels.cases import select

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret"]
COMPILED = [*IMPLS, pytest.param("pallas", marks=pytest.mark.gpu)]


def i32(*values):
    return jnp.asarray(values, jnp.int32)


def check(arrays, result, bound, dtype):
    """Compare a call with the oracle, request by request."""
    out, cache, flags, health = jax.device_get(result)
    given = wide(arrays)
    assert health == 0
    assert not flags.any()
    for index, slot in enumerate(given["slots"]):
        length = given["lengths"][index]
        request = jax.tree.map(lambda leaf, at=(index, length): leaf[at[0], : at[1]], given["rows"])
        window, state = oracles.kda_replay(
            given["cache"], slot, given["starts"][index], given["accepted"][index]
        )
        if given["fresh"][index]:
            state = np.zeros_like(state)
        expected = oracles.kda_tokens(request, window, state, given["weights"], bound, EPS)
        terms = length + state.shape[1]
        assert_close(out[index, :length], expected[0], dtype, terms)
        assert not out[index, length:].any()
        end = given["starts"][index] + length
        window = oracles.kda_window(cache.conv[slot].astype(np.float64), end)
        np.testing.assert_array_equal(window, expected[1])
        assert_close(cache.state[slot], expected[2], dtype, terms)


def poisoned(arrays):
    """NaN in the padding rows and in everything that a fresh request's slot held."""
    padding = jnp.arange(arrays["rows"].qkv.shape[1])[None] >= arrays["lengths"][:, None]
    rows = jax.tree.map(lambda leaf: jnp.where(padding[..., None], jnp.nan, leaf), arrays["rows"])
    stale = arrays["slots"][arrays["fresh"]]
    cache = jax.tree.map(lambda leaf: leaf.at[stale].set(jnp.nan), arrays["cache"])
    return {**arrays, "rows": rows, "cache": cache}


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("kda_prefill"))
def test_matches_float64(case, dtype, impl):
    arrays = made(case, dtype)
    result = jax.jit(bind(case, impl))(poisoned(arrays))
    assert result[0].dtype == dtype
    check(arrays, result, case.dims["lower_bound"], dtype)
    assert_same_bits(result[1].pending, poisoned(arrays)["cache"].pending)


@pytest.fixture(scope="module")
def long():
    """Two requests of up to 150 rows, compiled once: (ops by impl, arrays)."""
    case = select("kda_prefill", "tiny")[0]
    impls = (*IMPLS, "pallas")
    return {impl: jax.jit(bind(case, impl)) for impl in impls}, made(case, jnp.float32)


@pytest.mark.parametrize("impl", COMPILED)
class TestDecays:
    def test_the_strongest_bounded_decay(self, long, impl):
        """Nearly -5 each row: -320 in 64 rows, whose inverse no float32 holds."""
        ops, arrays = long
        weights = dataclasses.replace(
            arrays["weights"], dt_bias=jnp.full_like(arrays["weights"].dt_bias, 12.0)
        )
        given = {**arrays, "weights": weights}
        check(given, ops[impl](given), -5.0, jnp.float32)

    def test_softplus_decays_without_a_bound(self, impl):
        """From none at all to thousands in a row, mixed."""
        case = select("kda_prefill", "tiny")[1]
        arrays = made(case, jnp.float32)
        rows = dataclasses.replace(
            arrays["rows"], decay=jnp.sign(arrays["rows"].decay) * arrays["rows"].decay ** 2 * 50
        )
        given = {**arrays, "rows": rows}
        check(given, jax.jit(bind(case, impl))(given), None, jnp.float32)

    def test_repeated_keys_without_decay(self, long, impl):
        """The triangular system at its worst: its powers would grow as binomials."""
        ops, arrays = long
        weights = dataclasses.replace(
            arrays["weights"], dt_bias=jnp.full_like(arrays["weights"].dt_bias, -30.0)
        )
        rows = arrays["rows"]
        same = jnp.broadcast_to(rows.qkv[:, :1], rows.qkv.shape)
        rows = dataclasses.replace(rows, qkv=same, beta=jnp.full_like(rows.beta, 20.0))
        given = {**arrays, "weights": weights, "rows": rows}
        check(given, ops[impl](given), -5.0, jnp.float32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("piece", [1, 7, 16, 64])
def test_pieces_equal_one_shot(long, impl, piece):
    ops, arrays = long
    length = 150 if piece > 1 else 20
    whole = {**arrays, "lengths": i32(length, length)}
    expected, expected_cache, _, _ = jax.device_get(ops[impl](whole))
    cache, outputs = arrays["cache"], []
    for start in range(0, length, piece):
        count = min(piece, length - start)
        rows = jax.tree.map(
            lambda leaf, at=start: np.roll(np.asarray(leaf), -at, axis=1), arrays["rows"]
        )
        first = start == 0
        out, cache, _, _ = ops[impl](
            {
                **arrays,
                "rows": rows,
                "cache": cache,
                "lengths": i32(count, count),
                "starts": arrays["starts"] + start,
                "fresh": arrays["fresh"] & first,
                "accepted": arrays["accepted"] * int(first),
            }
        )
        outputs.append(np.asarray(out)[:, :count])
    slots = np.asarray(arrays["slots"])
    pairs = (
        (np.concatenate(outputs, axis=1), expected[:, :length]),
        (np.asarray(cache.state)[slots], expected_cache.state[slots]),
    )
    for actual, one_shot in pairs:
        assert np.linalg.norm(actual - one_shot) <= 1e-5 * np.linalg.norm(one_shot)
    ends = np.asarray(arrays["starts"]) + length
    for slot, end in zip(slots, ends, strict=True):
        rings = (np.asarray(leaf.conv[slot]) for leaf in (cache, expected_cache))
        assert_same_bits(*(oracles.kda_window(ring, end) for ring in rings))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("length", [1, 4])
def test_decode_continues_what_prefill_began(impl, length):
    """Rows run by prefill equal the same rows run by decode and then committed."""
    case = select("kda_prefill", "tiny")[2]
    arrays = made(case, jnp.float32)
    first = jax.tree.map(lambda leaf: leaf[:, :length], arrays["rows"])
    known = {"lower_bound": -5.0, "norm_eps": EPS, "impl": impl}
    none, fresh = i32(0, 0, 0), jnp.ones(3, bool)
    slots, weights = arrays["slots"], arrays["weights"]
    lengths = i32(length, length, length)
    out, cache, _, _ = jax.jit(partial(kda_prefill, **known))(
        first, weights, arrays["cache"], slots, none, none, fresh, lengths=lengths
    )
    blank = jax.tree.map(jnp.zeros_like, arrays["cache"])
    decoded, decode_cache, _, _ = jax.jit(partial(kda_decode, **known))(
        first, weights, blank, slots, none, none
    )
    committed = jax.jit(kda_commit)(decode_cache, slots, lengths, lengths)
    used = np.asarray(slots)
    assert_close(out, wide(decoded), jnp.float32, 64)
    assert_close(cache.state[used], wide(committed.state[used]), jnp.float32, 64)
    for slot in used:
        windows = (oracles.kda_window(np.asarray(x.conv[slot]), length) for x in (cache, committed))
        assert_same_bits(*windows)


@pytest.mark.parametrize("impl", IMPLS)
def test_pending_rows_are_committed_first(long, impl):
    ops, arrays = long
    slots = arrays["slots"]
    given = {**arrays, "fresh": jnp.zeros(2, bool), "starts": i32(5, 90), "accepted": i32(3, 9)}
    committed = jax.jit(kda_commit)(arrays["cache"], slots, given["starts"], given["accepted"])
    expected = ops[impl]({**given, "cache": committed, "accepted": i32(0, 0)})
    assert_same_bits(ops[impl](given), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_run_keeps_the_slot(long, impl):
    ops, arrays = long
    given = {**arrays, "lengths": i32(0, 0), "accepted": i32(0, 0), "fresh": jnp.zeros(2, bool)}
    out, cache, flags, _ = ops[impl](given)
    assert not np.asarray(out).any()
    assert not np.asarray(flags).any()
    assert_same_bits(cache, arrays["cache"])


@pytest.mark.parametrize("impl", IMPLS)
def test_null_slots_and_other_slots(long, impl):
    ops, arrays = long
    clean, clean_cache, _, _ = ops[impl](arrays)
    live = int(arrays["slots"][1])
    others = np.setdiff1d(np.arange(len(arrays["cache"].state)), live)
    cache = jax.tree.map(lambda leaf: leaf.at[others].set(jnp.nan), arrays["cache"])
    rows = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), arrays["rows"])
    for null, health_bits in ((0, 0), (-3, 0), (len(cache.state), BIT_SLOT)):
        slots = i32(null, live)
        out, new, flags, health = ops[impl](
            {**arrays, "rows": rows, "cache": cache, "slots": slots}
        )
        assert health == health_bits
        assert not np.asarray(flags).any()
        assert not np.asarray(out[0]).any()
        assert_same_bits(out[1], clean[1])
        assert_same_bits(new.state[live], clean_cache.state[live])
        rest = others[others > 0]
        assert_same_bits(
            jax.tree.map(lambda leaf, rest=rest: leaf[rest], new),
            jax.tree.map(lambda leaf, rest=rest: leaf[rest], cache),
        )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_row_flags_its_request_alone(long, impl):
    ops, arrays = long
    clean, _, _, _ = ops[impl](arrays)
    rows = arrays["rows"]
    rows = dataclasses.replace(rows, beta=rows.beta.at[1, 40, 0].set(jnp.nan))
    out, _, flags, _ = ops[impl]({**arrays, "rows": rows})
    assert np.asarray(flags).tolist() == [False, True]
    assert_same_bits(out[0], clean[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_donated_cache_gives_the_same_bits(impl):
    """Two requests in turn through one reused slot, the cache donated or not."""
    case = select("kda_prefill", "tiny")[2]
    arrays = made(case, jnp.float32)
    known = {"lower_bound": -5.0, "norm_eps": EPS, "impl": impl}
    names = ("starts", "accepted", "fresh", "lengths")

    def step(rows, weights, cache, slots, starts, accepted, fresh, lengths):
        return kda_prefill(
            rows, weights, cache, slots, starts, accepted, fresh, lengths=lengths, **known
        )

    rows = [arrays["rows"], KdaRows(*(leaf[::-1] for leaf in jax.tree.leaves(arrays["rows"])))]
    results = []
    for donated in ((), (2,)):
        cache, outputs = jax.tree.map(jnp.copy, arrays["cache"]), []
        op = jax.jit(step, donate_argnums=donated)
        for turn in rows:
            given = cache
            out, cache, _, _ = op(
                turn, arrays["weights"], given, arrays["slots"], *(arrays[name] for name in names)
            )
            assert given.state.is_deleted() == bool(donated)
            outputs.append(out)
        results.append((outputs, cache))
    assert_same_bits(*results)
