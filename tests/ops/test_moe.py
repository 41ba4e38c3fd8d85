"""Router and routed experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_EXPERT, Mxfp4Bank, moe, moe_grouped_pallas, route
from pallas_kernels.case_inputs import bind, inputs, options
from pallas_kernels.cases import Case, select
from pallas_kernels.moe_mxfp4_pallas import MoeTiles, moe_mxfp4_pallas
from pallas_kernels.mxfp4 import dequantize

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret"]


def bank_float64(bank):
    if not isinstance(bank, Mxfp4Bank):
        return wide(bank.w13), wide(bank.w2)
    pairs = ((bank.w13, bank.w13_scale), (bank.w2, bank.w2_scale))
    return tuple(wide(dequantize(words, scales)) for words, scales in pairs)


@pytest.fixture(scope="module", params=["decode", "prefill"])
def compiled(request):
    """A small MXFP4 case, compiled once for the tests below: (op by implementation, arrays)."""
    case = select("moe_mxfp4", "tiny", request.param)[0]

    def result(impl):
        return jax.jit(lambda arrays: bind(case, impl)(arrays)[0])

    return {impl: result(impl) for impl in IMPLS}, made(case, jnp.float32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("route"))
def test_route_matches_float64(case, dtype, impl):
    arrays = made(case, dtype)
    experts, weights = jax.jit(bind(case, impl))(arrays)
    expected = oracles.route(**wide(arrays), **options(case))
    assert experts.dtype == jnp.int32
    np.testing.assert_array_equal(experts, expected[0])
    assert_close(weights, expected[1], jnp.float32, case.dims["D"])


def routed(logits, bias, impl, **changes):
    """Route one row whose router logits are given."""
    known = {"top_k": 3, "scaling": 1.0, "renormalize": True, **changes}
    weight = jnp.asarray(logits, jnp.float32)[:, None]
    experts, weights = route(
        jnp.ones((1, 1)), weight, jnp.asarray(bias, jnp.float32), impl=impl, **known
    )
    return experts[0].tolist(), np.asarray(weights[0])


@pytest.mark.parametrize("impl", IMPLS)
class TestRoute:
    def test_ties_go_to_the_lower_id(self, impl):
        assert routed([0.0] * 6, [0.0] * 6, impl)[0] == [0, 1, 2]
        assert routed([0, 0, 1, 0, 0, 1], [0.0] * 6, impl)[0] == [2, 5, 0]
        # Scores of 0.5 and a bias of -0.5 tie at zero, whatever sign the zeros have.
        assert routed([0.0] * 4, [-0.5, -0.5, -0.5, -0.5], impl)[0] == [0, 1, 2]

    def test_nan_is_never_selected(self, impl):
        logits = [np.nan, 0.0, -9.0, np.nan, 1.0]
        experts, weights = routed(logits, [0.0] * 5, impl)
        assert experts == [4, 1, 2]
        assert np.isfinite(weights).all()
        assert routed([0.0] * 5, [np.nan, 0, 0, np.nan, -5], impl)[0] == [1, 2, 4]

    def test_the_bias_only_selects(self, impl):
        experts, weights = routed([0.0, 1.0, 2.0, 3.0], [9.0, 0.0, 0.0, 0.0], impl)
        assert experts == [0, 3, 2]
        scores = oracles.sigmoid(np.array([0.0, 3.0, 2.0]))
        np.testing.assert_allclose(weights, scores / scores.sum(), rtol=1e-6)

    def test_scores_that_vanish_divide_by_1e_20(self, impl):
        experts, weights = routed([-200.0] * 4, [0.0] * 4, impl)
        assert experts == [0, 1, 2]
        np.testing.assert_array_equal(weights, 0.0)

    def test_top_k_beyond_the_experts_is_refused(self, impl):
        with pytest.raises(ValueError, match=r"top_k 5 .* 4 experts"):
            routed([0.0] * 4, [0.0] * 4, impl, top_k=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "impl"),
    [
        pytest.param(case, impl, id=f"{case}-{impl}")
        for case in (*select("moe_mxfp4", "tiny"), *select("moe", "tiny"))
        for impl in IMPLS
        if impl == "reference" or case.op == "moe_mxfp4"
    ],
)
def test_matches_float64(case, dtype, impl):
    arrays = made(case, dtype)
    actual, health = jax.jit(bind(case, impl))(arrays)
    assert actual.dtype == jnp.float32
    assert health.dtype == jnp.uint32
    assert health == 0
    rows = [wide(arrays[name]) for name in ("z", "experts", "weights")]
    expected = oracles.moe(*rows, *bank_float64(arrays["bank"]), **options(case))
    assert_close(actual, expected, dtype, case.dims["Z"] + case.dims["I"])


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_call_gives_the_same_bits(compiled, impl):
    ops, arrays = compiled
    assert_same_bits(ops[impl](arrays), ops[impl](arrays))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_row_stays_alone(compiled, impl):
    ops, arrays = compiled
    clean = ops[impl](arrays)
    actual = ops[impl]({**arrays, "z": arrays["z"].at[3].set(jnp.nan)})
    assert np.isnan(actual[3]).all()
    others = np.arange(len(clean)) != 3
    assert_same_bits(actual[others], clean[others])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_does_not_depend_on_its_company(compiled, impl):
    """Each row among copies of itself, which crowd its experts, against the row in the batch."""
    ops, arrays = compiled
    together = np.asarray(ops[impl](arrays))
    for row in (0, 5):
        alike = {
            name: jnp.broadcast_to(arrays[name][row], arrays[name].shape)
            for name in ("z", "experts", "weights")
        }
        crowd = np.asarray(ops[impl]({**arrays, **alike}))
        np.testing.assert_allclose(crowd[0], together[row], rtol=1e-5, atol=1e-6)
        assert_same_bits(crowd, np.broadcast_to(crowd[:1], crowd.shape).copy())


@pytest.mark.parametrize("impl", IMPLS)
def test_ids_outside_the_bank_are_skipped(compiled, impl):
    ops, arrays = compiled
    experts = arrays["experts"].at[1].set(-1).at[2, 1:].set(arrays["bank"].w13.shape[0])
    weights = arrays["weights"].at[1].set(0.0).at[2, 1:].set(0.0)
    skipped = ops[impl]({**arrays, "experts": experts})
    weightless = ops[impl]({**arrays, "weights": weights})
    assert not np.asarray(skipped[1]).any()
    np.testing.assert_allclose(skipped, weightless, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("impl", IMPLS)
def test_ids_that_are_no_expert_set_a_bit(impl, rows):
    case = select("moe_mxfp4", "tiny", "decode")[1]
    arrays = made(case, jnp.float32)
    repeated = ("z", "experts", "weights")
    arrays = arrays | {name: jnp.tile(arrays[name], (rows, 1))[:rows] for name in repeated}
    op = jax.jit(bind(case, impl))
    count = arrays["bank"].w13.shape[0]
    for wrong, bit in ((-1, 0), (count - 1, 0), (count, BIT_EXPERT), (-2, BIT_EXPERT)):
        out, health = op({**arrays, "experts": arrays["experts"].at[rows - 1, 2].set(wrong)})
        assert health == bit
        assert np.isfinite(out).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_last_expert_is_read_from_its_place(compiled, impl):
    ops, arrays = compiled
    last = arrays["bank"].w13.shape[0] - 1
    experts = jnp.full_like(arrays["experts"], -1).at[:, 0].set(last)
    poisoned = jax.tree.map(
        lambda leaf: leaf if leaf.dtype != jnp.uint8 else leaf.at[:last].set(255), arrays["bank"]
    )
    clean = ops[impl]({**arrays, "experts": experts})
    assert np.abs(clean).min(axis=1).all()
    assert_same_bits(ops[impl]({**arrays, "experts": experts, "bank": poisoned}), clean)


def test_more_rows_than_at_once_come_in_rounds(monkeypatch):
    """The last round is padded; rows are the same in rounds of any size, skipped ones too."""
    case = select("moe_mxfp4", "tiny", "prefill")[0]
    arrays = made(case, jnp.float32)
    count = arrays["bank"].w13.shape[0]
    arrays = arrays | {"experts": arrays["experts"].at[149, 1].set(-1).at[3, 0].set(count)}
    whole, health = jax.jit(bind(case, "interpret"))(arrays)
    monkeypatch.setattr(moe_grouped_pallas, "CHUNK_ROWS", 64)
    found, same_health = jax.jit(lambda arrays: bind(case, "interpret")(arrays))(arrays)
    assert found.shape == whole.shape == (150, 64)
    assert_same_bits(found, whole)
    assert health == same_health == BIT_EXPERT


def test_the_reference_decodes_one_expert_at_a_time():
    """Its temporaries at Kimi-K3's size stay near two decoded experts, 16 MB each in float32."""
    case = next(c for c in select("moe_mxfp4", "k3-tp8", "decode") if c.dims["W"] == 64)
    shapes = jax.eval_shape(partial(inputs, case, jnp.float32))
    memory = jax.jit(bind(case, "reference")).lower(shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 << 20


def test_a_dense_bank_has_the_reference_alone():
    arrays = made(select("moe", "tiny")[0], jnp.float32)
    with pytest.raises(NotImplementedError, match="moe has no implementation 'pallas'"):
        moe(**arrays, **options(select("moe", "tiny")[0]), impl="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("tp", [4, 2])
def test_the_last_expert_of_a_large_bank_is_read_from_its_place(tp, rows):
    """Its words lie beyond 2 or 4 GiB, where offsets of 32 bits would wrap; all others are NaN."""
    case = next(c for c in select("moe_mxfp4", f"k3-tp{tp}") if c.dims["W"] == 16)
    small = Case("moe_mxfp4", "one", frozenset(), {**case.dims, "W": rows, "E": 1, "J": 1})
    arrays = made(small, jnp.bfloat16)
    last = case.dims["E"] - 1

    def spread(leaf):
        empty = jnp.full((last, *leaf.shape[1:]), 255, leaf.dtype)
        return jnp.concatenate([empty, leaf])

    bank = jax.jit(partial(jax.tree.map, spread))(arrays["bank"])
    experts = arrays["experts"] + last
    actual, health = jax.jit(bind(case, "pallas"))({**arrays, "bank": bank, "experts": experts})
    assert health == 0
    assert_close(
        actual,
        np.asarray(jax.jit(bind(case, "reference"))(arrays)[0], np.float64),
        jnp.bfloat16,
        case.dims["Z"] + case.dims["I"],
    )


@pytest.mark.parametrize("splits", [2, 4])
def test_the_depth_may_come_in_pieces(splits):
    """Gate and up in pieces of the depth, and more rows than a program then serves at once."""
    case = select("moe_mxfp4", "tiny", "decode")[0]
    wide = Case(case.op, "deep", frozenset(), {**case.dims, "Z": 512, "E": 5})
    arrays = made(wide, jnp.float32)
    tiles = MoeTiles(16, 8 // splits, 1, 32, 16, splits=splits)
    static = options(case) | {"interpret": True, "tiles": tiles}
    actual, _ = jax.jit(partial(moe_mxfp4_pallas, **static))(**arrays)
    expected, _ = jax.jit(bind(wide, "reference"))(arrays)
    assert_close(actual, np.asarray(expected, np.float64), jnp.float32, 512)
