"""Latent attention over the paged cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BIT_PAGE, mla_decode, mla_prefill
from pallas_kernels.case_inputs import bind, options
from pallas_kernels.cases import select

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


def seen_rows(arrays, rows):
    """Positions each row sees: i32[B, T]."""
    offsets = np.arange(rows)[None]
    if "starts" not in arrays:
        return arrays["lengths"][:, None] - rows + offsets + 1
    valid = offsets < arrays["lengths"][:, None]
    return np.where(valid, arrays["starts"][:, None] + offsets + 1, 0)


def expected_output(arrays, case):
    arrays = wide(arrays)
    seen = seen_rows(arrays, arrays["q"].shape[1])
    requests = [
        oracles.mla(q, arrays["pages"][table].reshape(-1, q.shape[-1]), row_seen, **options(case))
        for q, table, row_seen in zip(arrays["q"], arrays["page_table"], seen, strict=True)
    ]
    return np.stack(requests)


def poison_unwritten(arrays):
    """NaN in page 0 and in every cached row that no request has written."""
    lengths = np.asarray(arrays["lengths"]) + np.asarray(arrays.get("starts", 0))
    pages = np.asarray(arrays["pages"]).copy()
    written = np.zeros(pages.shape[:2], bool)
    for table, length in zip(np.asarray(arrays["page_table"]), lengths, strict=True):
        position = np.arange(length)
        written[table[position // pages.shape[1]], position % pages.shape[1]] = True
    pages[~written] = np.nan
    return {**arrays, "pages": jnp.asarray(pages)}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*tiny("mla_decode"), *tiny("mla_prefill")])
def test_matches_float64(case, dtype, impl):
    arrays = poison_unwritten(made(case, dtype))
    out, flags, health = jax.jit(bind(case, impl))(arrays)
    assert out.dtype == dtype
    assert_close(out, expected_output(arrays, case), dtype, case.dims["L"])
    assert not np.asarray(flags).any()
    assert health == 0


@pytest.fixture(scope="module")
def decode():
    """A small decode case, compiled once for the tests below."""
    case = select("mla_decode", "tiny")[0]
    impls = ("reference", "interpret", "pallas")
    return {impl: jax.jit(bind(case, impl)) for impl in impls}, made(case, jnp.float32)


@pytest.mark.parametrize("impl", IMPLS)
class TestDecode:
    def test_null_requests_give_zeros_and_no_flag(self, decode, impl):
        ops, arrays = decode
        clean, _, _ = ops[impl](arrays)
        null = {
            "lengths": arrays["lengths"].at[0].set(0),
            "q": arrays["q"].at[0].set(jnp.nan),
            "page_table": arrays["page_table"].at[0].set(0),
            "pages": arrays["pages"].at[0].set(jnp.nan),
        }
        out, flags, health = ops[impl]({**arrays, **null})
        assert not np.asarray(out[0]).any()
        assert_same_bits(out[1:], clean[1:])
        assert not np.asarray(flags).any()
        assert health == 0

    def test_nan_flags_its_request_alone(self, decode, impl):
        ops, arrays = decode
        clean, _, _ = ops[impl](arrays)
        page = arrays["page_table"][1, 0]
        poisoned = {**arrays, "pages": arrays["pages"].at[page, 3].set(jnp.nan)}
        out, flags, health = ops[impl](poisoned)
        assert np.asarray(flags).tolist() == [False, True, False]
        assert_same_bits(out[::2], clean[::2])
        assert health == 0

    def test_a_nan_in_a_draft_row_stays_there(self, decode, impl):
        """The last row's latents: the rows before it, of every request, do not see them."""
        ops, arrays = decode
        clean, _, _ = ops[impl](arrays)
        last = int(arrays["lengths"][1]) - 1
        page_size = arrays["pages"].shape[1]
        page = arrays["page_table"][1, last // page_size]
        for value in (jnp.nan, jnp.inf):
            pages = arrays["pages"].at[page, last % page_size].set(value)
            out, flags, health = ops[impl]({**arrays, "pages": pages})
            assert_same_bits(out[::2], clean[::2])
            assert_same_bits(out[1, :-1], clean[1, :-1])
            assert not np.isfinite(out[1, -1]).any()
            assert np.asarray(flags).tolist() == [False, True, False]
            assert health == 0

    @pytest.mark.parametrize("page", [-1, 10**6])
    def test_a_bad_page_in_use_sets_its_bit(self, decode, impl, page):
        ops, arrays = decode
        bad = {**arrays, "page_table": arrays["page_table"].at[2, 0].set(page)}
        assert ops[impl](bad)[2] == BIT_PAGE

    def test_a_bad_page_beyond_the_length_does_not(self, decode, impl):
        ops, arrays = decode
        short = {**arrays, "lengths": jnp.minimum(arrays["lengths"], 20)}
        clean, _, _ = ops[impl](short)
        out, _, health = ops[impl]({**short, "page_table": arrays["page_table"].at[:, 2:].set(-7)})
        assert health == 0
        assert_same_bits(out, clean)

    def test_a_length_beyond_the_table_sets_the_bit(self, decode, impl):
        ops, arrays = decode
        assert ops[impl]({**arrays, "lengths": arrays["lengths"] + 1000})[2] == BIT_PAGE

    def test_fewer_tokens_than_rows(self, decode, impl):
        """Rows before the first token see nothing and give zeros."""
        ops, arrays = decode
        out, flags, _ = ops[impl]({**arrays, "lengths": jnp.full(3, 2, jnp.int32)})
        assert not np.asarray(out[:, :2]).any()
        assert np.asarray(out[:, 2:]).any(axis=(1, 2, 3)).all()
        assert not np.asarray(flags).any()


@pytest.mark.parametrize("impl", IMPLS)
def test_prefill_ignores_padding_rows_and_null_requests(impl):
    case = select("mla_prefill", "tiny")[1]
    arrays = made(case, jnp.float32)
    op = jax.jit(bind(case, impl))
    clean, _, _ = op(arrays)
    lengths = arrays["lengths"].at[0].set(0)
    padding = np.arange(case.dims["T"])[None] >= np.asarray(lengths)[:, None]
    q = jnp.where(padding[..., None, None], jnp.nan, arrays["q"])
    table = arrays["page_table"].at[0].set(-1)
    out, flags, health = op({**arrays, "q": q, "lengths": lengths, "page_table": table})
    assert not np.asarray(out)[padding].any()
    assert_same_bits(out[1:], clean[1:])
    assert not np.asarray(flags).any()
    assert health == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_prefill_rows_do_not_see_a_later_nan(impl):
    """Latents of row 7: finite before it, NaN from it on."""
    case = select("mla_prefill", "tiny")[1]
    arrays = made(case, jnp.float32)
    op = jax.jit(bind(case, impl))
    clean, _, _ = op(arrays)
    position = int(arrays["starts"][0]) + 7
    page_size = arrays["pages"].shape[1]
    page = arrays["page_table"][0, position // page_size]
    pages = arrays["pages"].at[page, position % page_size].set(jnp.nan)
    out, flags, health = op({**arrays, "pages": pages})
    assert_same_bits(out[0, :7], clean[0, :7])
    assert_same_bits(out[1], clean[1])
    assert not np.isfinite(out[0, 7 : arrays["lengths"][0]]).any()
    assert np.asarray(flags).tolist() == [True, False]
    assert health == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_decode_agrees_with_prefill(impl):
    case = select("mla_prefill", "tiny")[1]
    arrays = made(case, jnp.float32)
    rows = case.dims["T"]
    lengths = jnp.full(2, rows, jnp.int32)
    names = ("q", "pages", "page_table")
    known = {name: arrays[name] for name in names}
    static = {**options(case), "impl": impl}
    prefill, _, _ = jax.jit(partial(mla_prefill, **static))(
        **known, starts=arrays["starts"], lengths=lengths
    )
    decode, _, _ = jax.jit(partial(mla_decode, **static))(
        **known, lengths=arrays["starts"] + lengths
    )
    np.testing.assert_allclose(prefill, decode, rtol=1e-5, atol=1e-6)


def test_the_reference_reads_a_long_context_group_by_group():
    """A page table of a million positions costs no more than what is used of it."""
    case = select("mla_decode", "tiny")[0]
    arrays = made(case, jnp.float32)
    wide_table = jnp.zeros((3, 1 << 16), jnp.int32).at[:, :7].set(arrays["page_table"])
    op = jax.jit(bind(case, "reference"))
    lowered = op.lower({**arrays, "page_table": wide_table})
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 << 20
    actual, _, _ = op({**arrays, "page_table": wide_table})
    np.testing.assert_allclose(actual, op(arrays)[0], rtol=1e-5, atol=1e-6)


def test_misfit_shapes_are_refused():
    known = {
        "pages": jnp.zeros((4, 8, 48)),
        "page_table": jnp.zeros((1, 2), jnp.int32),
        "lengths": jnp.ones(1, jnp.int32),
        "scale": 1.0,
        "impl": "reference",
    }
    with pytest.raises(ValueError, match="mla_decode takes"):
        mla_decode(jnp.zeros((1, 1, 2, 40)), latent=32, **known)
    with pytest.raises(ValueError, match="latent width 64"):
        mla_decode(jnp.zeros((1, 1, 2, 48)), latent=64, **known)
