"""The latent MoE of a decode step in one launch: results, hand-offs, and a wait that ends."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_WAIT, MOST_MONO_ROWS, linear, moe_mxfp4, route
from pallas_kernels.case_inputs import bind, inputs, options
from pallas_kernels.cases import select
from pallas_kernels.moe_mono_tiles import counters, mono_tiles, sizes_of
from pallas_kernels.persistent import EPOCH, HEADER, TICKET

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, wide
from .test_moe import bank_float64

CASE, SMALL = select("moe_mono", "tiny")
IMPLS = [
    "reference",
    "interpret",
    pytest.param("pallas", marks=pytest.mark.gpu),
]
KERNELS = [each for each in IMPLS if each != "reference"]


@cache
def compiled(case, impl):
    return jax.jit(bind(case, impl))


def counters_of(arrays):
    sizes = sizes_of(arrays["x"], arrays["weights"], CASE.dims["J"])
    return counters(sizes, mono_tiles(sizes, exact=arrays["x"].dtype == jnp.float32))


def separate(arrays, case, impl="reference"):
    """The same step by the ops that the launch replaces."""
    known, weights, x = options(case), arrays["weights"], arrays["x"]
    activation = known.pop("activation")
    experts, chosen = route(x, weights.router, weights.bias, **known, impl=impl)
    z = linear(x, weights.down, impl=impl)
    routed, _ = moe_mxfp4(z, experts, chosen, weights.bank, activation=activation, impl=impl)
    inner = linear(x, weights.shared_gate_up, activation=activation, impl=impl)
    shared = linear(inner, weights.shared_down, out_dtype=jnp.float32, impl=impl)
    return routed, shared, experts, chosen


def assert_like_separate(result, arrays, case):
    routed, shared, experts, chosen = jax.jit(partial(separate, case=case))(arrays)
    dtype = arrays["x"].dtype
    np.testing.assert_array_equal(result.experts, experts)
    assert_close(result.weights, wide(chosen), jnp.float32, case.dims["D"])
    assert_close(result.routed, wide(routed), dtype, case.dims["D"] + case.dims["I"])
    assert_close(result.shared, wide(shared), dtype, case.dims["D"] + case.dims["S"])
    assert not result.flags.any()
    assert result.health == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [CASE, SMALL], ids=str)
def test_matches_float64(case, dtype, impl):
    arrays, known = made(case, dtype), options(case)
    result = compiled(case, impl)(arrays)
    activation = known.pop("activation")
    x, weights = wide(arrays["x"]), wide(dataclasses.replace(arrays["weights"], bank=None))
    experts, chosen = oracles.route(x, weights.router, weights.bias, **known)
    bank = bank_float64(arrays["weights"].bank)
    routed = oracles.moe(x @ weights.down.T, experts, chosen, *bank, activation)
    gate, up = np.split(x @ weights.shared_gate_up.T, 2, axis=1)
    shared = oracles.gated(activation, gate, up) @ weights.shared_down.T
    np.testing.assert_array_equal(result.experts, experts)
    dims = case.dims
    assert_close(result.weights, chosen, jnp.float32, dims["D"])
    assert_close(result.routed, routed, dtype, dims["D"] + dims["Z"] + dims["I"])
    assert_close(result.shared, shared, dtype, dims["D"] + dims["S"])
    assert not result.flags.any()
    assert result.health == 0


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("rows", [2, 16])
def test_rows_that_choose_the_same_experts_equal_the_separate_ops(rows, impl):
    case = dataclasses.replace(CASE, dims={**CASE.dims, "W": rows})
    arrays = dict(jax.jit(lambda: inputs(case, jnp.bfloat16))())
    arrays["x"] = arrays["x"].at[rows // 2 :].set(arrays["x"][: rows // 2])
    result = jax.jit(bind(case, impl))(arrays)
    assert_like_separate(result, arrays, case)
    assert_same_bits(result.routed[rows // 2 :], result.routed[: rows // 2])
    assert_same_bits(result.shared[rows // 2 :], result.shared[: rows // 2])


@pytest.mark.parametrize("impl", KERNELS)
def test_launches_follow_each_other_on_the_same_control_words(impl):
    arrays, run = made(CASE, jnp.float32), compiled(CASE, impl)
    first = run(arrays)
    control = first.control
    for epoch in range(2, 5):
        result = run({**arrays, "control": control})
        control = result.control
        assert_same_bits(result[:6], first[:6])
        assert control[TICKET] == 0
        assert control[EPOCH] == epoch
    changed = run({**arrays, "control": control, "x": -arrays["x"]})
    assert_like_separate(changed, {**arrays, "x": -arrays["x"]}, CASE)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("epoch", [1, 77, 2**31 - 1, -(2**31), -1])
def test_any_epoch_serves(epoch, impl):
    """A counter stands at the epoch times what a launch adds to it, modulo 2^32."""
    arrays, run = made(CASE, jnp.float32), compiled(CASE, impl)
    first = run(arrays)
    result = run({**arrays, "control": first.control * jnp.int32(epoch)})
    assert_same_bits(result[:6], first[:6])
    assert_same_bits(
        result.control, first.control * jnp.int32(np.int64(epoch + 1).astype(np.int32))
    )


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("counter", ["logits", "latent", "chosen", "shared", "hidden"])
def test_a_wait_for_what_never_comes_gives_up_and_says_so(counter, impl):
    arrays, run = made(CASE, jnp.float32), compiled(CASE, impl)
    word = HEADER + getattr(counters_of(arrays), counter)
    stalled = run({**arrays, "control": arrays["control"].at[word].add(-1)})
    assert stalled.health == BIT_WAIT
    after = run({**arrays, "control": stalled.control})
    assert after.health == BIT_WAIT
    assert_same_bits(after.control, stalled.control)  # no ticket was taken


@pytest.mark.parametrize("impl", KERNELS)
def test_a_row_that_does_not_live_chooses_nothing(impl):
    arrays, run = made(CASE, jnp.float32), compiled(CASE, impl)
    clean, known = run(arrays), compiled(CASE, "reference")
    live = arrays["live"].at[3].set(False)
    dead = {**arrays, "live": live, "x": arrays["x"].at[3].set(jnp.nan)}
    result, expected = run(dead), known(dead)
    others = np.arange(len(live)) != 3
    for name in ("routed", "shared", "experts", "weights"):
        assert_same_bits(getattr(result, name)[others], getattr(clean, name)[others])
    for each in (result, expected):
        assert (each.experts[3] == -1).all()
        assert (each.weights[3] == 0).all()
        assert (each.routed[3] == 0).all()
        assert not each.flags.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_is_not_finite_is_flagged_alone(impl):
    arrays, run = made(CASE, jnp.float32), compiled(CASE, impl)
    clean = run(arrays)
    x = arrays["x"].at[2].set(jnp.nan)
    result = run({**arrays, "x": x, "control": clean.control})
    others = np.arange(len(x)) != 2
    assert result.flags.tolist() == [False, False, True, False, False]
    assert_same_bits(result.routed[others], clean.routed[others])
    assert_same_bits(result.shared[others], clean.shared[others])
    assert not run({**arrays, "control": result.control}).flags.any()


def test_control_words_of_another_shape_are_refused():
    arrays = made(CASE, jnp.float32)
    other = made(SMALL, jnp.float32)["control"]
    with pytest.raises(ValueError, match=r"control has shape .* moe_mono_control makes"):
        jax.eval_shape(bind(CASE, "interpret"), {**arrays, "control": other})


def test_more_rows_are_refused():
    wider = dataclasses.replace(CASE, dims={**CASE.dims, "W": MOST_MONO_ROWS + 1})
    shapes = jax.eval_shape(partial(inputs, wider, jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="up to 16 rows, not 17"):
        jax.eval_shape(bind(wider, "interpret"), shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", select("moe_mono", "k3-tp8"), ids=str)
def test_a_rank_of_kimi_k3_equals_the_separate_ops(case):
    arrays = jax.jit(lambda: inputs(case, jnp.bfloat16))()
    run = jax.jit(bind(case, "pallas"))
    result = run(arrays)
    assert_like_separate(result, arrays, case)
    assert_same_bits(run({**arrays, "control": result.control})[:6], result[:6])
