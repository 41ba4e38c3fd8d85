"""MXFP4 decoding, packing and quantizing against what other packages recorded."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.mxfp4 import (
    block_groups,
    dequantize,
    gather,
    pack_words,
    quantize,
    spread,
)
from pallas_kernels.mxfp4_pallas import (
    PORTABLE,
    decode_cuda,
    decode_cuda_exact,
    decoders,
    joined,
    load_operands,
    load_words,
    multiply,
    raised,
    tiled,
)
from pallas_kernels.mxfp4_scaled_pallas import (
    in_weights_order,
    place_in_weights_order,
    product,
)

from . import oracles

DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.fixture(scope="module")
def recorded(golden):
    with np.load(golden / "mxfp4" / "mxfp4.npz") as file:
        return dict(file)


def decode(packed, scales, dtype):
    return np.asarray(jax.jit(dequantize, static_argnums=2)(pack_words(packed), scales, dtype))


def bits(values):
    """Bit patterns as float32, so that zeros have a sign and subnormals are compared in full."""
    return values.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_recorded_values(recorded, dtype):
    actual = decode(recorded["decode.packed"], recorded["decode.scale"], dtype)
    np.testing.assert_array_equal(bits(actual), bits(recorded["decode.values"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "package", ["nemo_fp32", "nemo_bf16", "compressed_tensors_bf16", "mlx_bf16"]
)
def test_decodes_extreme_scales_as_every_package_does(recorded, package, dtype):
    actual = decode(recorded["extreme.packed"], recorded["extreme.scale"], dtype)
    real = recorded["extreme.scale"][:, 0] < 255
    expected = recorded[f"extreme.values_{package}"]
    np.testing.assert_array_equal(bits(actual[real]), bits(expected[real]))
    assert np.isnan(actual[~real]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_every_scale_is_exact(dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = np.tile(codes[::2] | codes[1::2] << 4, (255, 1))
    scales = np.arange(255, dtype=np.uint8)[:, None]
    with np.errstate(over="ignore"):
        expected = oracles.mxfp4(packed, scales).astype(np.float32)
    np.testing.assert_array_equal(bits(decode(packed, scales, dtype)), bits(expected))


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("columns", [32, 96, 256, 3584])
def test_a_block_of_eight_rows_lies_together(rows, columns):
    packed = np.random.default_rng(0).integers(0, 256, (2, rows, columns // 2), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(2, rows, columns)
    words = pack_words(packed)
    assert words.shape == (2, rows, columns // 8)
    assert words.dtype == jnp.uint32
    groups, together = block_groups(columns), math.gcd(rows, 8)
    flat = np.asarray(words).reshape(2, rows // together, -1)
    for word in range(flat.shape[2]):
        rest, place = divmod(word, 4 * groups)
        block, row = divmod(rest, together)
        lane, group = divmod(place, groups)
        first = 32 * (groups * block + group) + 8 * lane
        for column in range(8):
            found = flat[:, :, word] >> np.uint32(4 * column) & 15
            np.testing.assert_array_equal(found, codes[:, row::together, first + column])


def test_quantizes_by_the_compressed_tensors_rule(recorded):
    packed, scales = quantize(recorded["quant.x_bf16"])
    np.testing.assert_array_equal(packed, recorded["quant.packed_ct"])
    np.testing.assert_array_equal(scales, recorded["quant.scale_ct"])
    values = decode(packed, scales, jnp.float32)
    np.testing.assert_array_equal(values, recorded["quant.dequant_ct"])


def test_quantizing_what_was_decoded_gives_it_back(recorded):
    values = recorded["decode.values"]
    packed, scales = quantize(values)
    np.testing.assert_array_equal(oracles.mxfp4(packed, scales), values)


def test_refusals():
    with pytest.raises(ValueError, match="groups of 32"):
        quantize(np.ones((2, 48)))
    with pytest.raises(ValueError, match="finite"):
        quantize(np.full((2, 32), np.nan))
    with pytest.raises(ValueError, match="8 words of 8 do not fit 1 scales"):
        dequantize(jnp.zeros((2, 8), jnp.uint32), jnp.zeros((2, 1), jnp.uint8))
    with pytest.raises(ValueError, match="float16"):
        dequantize(jnp.zeros((2, 4), jnp.uint32), jnp.zeros((2, 1), jnp.uint8), jnp.float16)


def test_the_quick_decoder_places_sign_and_magnitude():
    """Seen as bits: a CPU's arithmetic would take its values, near 2^-126, for zeros."""
    words = np.random.default_rng(0).integers(0, 1 << 32, (64, 1), dtype=np.uint32)
    actual = jax.jit(decode_cuda, static_argnums=1)(jax.jit(spread)(words), jnp.bfloat16)
    codes = words >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    expected = (codes & 8) << 12 | (codes & 7) << 6
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint16), expected)


def test_spread_words_hold_every_bit_once():
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    moved = np.asarray(jax.jit(spread)(bits))
    np.testing.assert_array_equal(np.sort(moved), bits)
    np.testing.assert_array_equal(jax.jit(gather)(moved), bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_decoder_reads_spread_words(dtype):
    words = np.random.default_rng(0).integers(0, 1 << 32, (64, 1), dtype=np.uint32)
    actual = jax.jit(decode_cuda_exact, static_argnums=1)(jax.jit(spread)(words), dtype)
    expected = jax.jit(PORTABLE.decode, static_argnums=1)(words, dtype)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(bits(np.asarray(actual)), bits(np.asarray(expected)))


def product_in_a_kernel(decoder, words, scales, rows, interpret):
    """One block of rows of weights by rows of values, in a program of one warp: f32[n, R]."""
    n, groups = scales.shape

    def kernel(words_ref, scales_ref, rows_ref, out_ref):
        index = jnp.arange(n, dtype=jnp.int32)
        row = jnp.arange(len(rows), dtype=jnp.int32)
        block = load_words(words_ref, scales_ref, 0, index, 0, groups)
        zeros = jnp.zeros((n, len(rows)), jnp.float32)
        sums = multiply(decoder, *block, load_operands(decoder, rows_ref, row, 0, groups), zeros)
        launch.store(out_ref.at[launch.mesh(index, row)], raised(decoder, sums))

    return launch.launch(
        kernel,
        tiled(words[None]),
        joined(scales[None]),
        rows,
        name="product",
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((n, len(rows)), jnp.float32),
        interpret=interpret,
        num_warps=1,
    )


def scaled_product_in_a_kernel(decoder, words, scales, rows, interpret):
    """The same with the scales in the weights, in programs of four warps and 64 weights each."""
    n = scales.shape[0]

    def kernel(words_ref, scales_ref, rows_ref, out_ref):
        index = pl.program_id(0) * 64 + jnp.arange(64, dtype=jnp.int32)
        row = jnp.arange(len(rows), dtype=jnp.int32)
        inside = row < len(rows)
        sums = product(decoder, words_ref, scales_ref, rows_ref, 0, index, row, inside)
        launch.store(out_ref.at[launch.mesh(index, row)], sums)

    return launch.launch(
        kernel,
        tiled(words[None]),
        joined(scales[None]),
        in_weights_order(rows),
        name="scaled_product",
        grid=(n // 64,),
        out_shape=jax.ShapeDtypeStruct((n, len(rows)), jnp.float32),
        interpret=interpret,
        num_warps=4,
    )


IMPLS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 128])
def test_scaled_weights_are_exact_on_every_code_and_scale(dtype, impl, columns):
    """Every column of each of 256 rows of weights, whose groups have different scales.

    Scales of 2^-126 and below wait for a GPU, as do their products: a CPU takes them for zero.
    """
    interpret = impl == "interpret"
    generator = np.random.default_rng(0)
    packed = generator.integers(0, 256, (256, columns // 2), dtype=np.uint8)
    low, high = (2 if interpret else 0), 252  # 6 * 2^125 is below 2^128
    scales = np.clip(np.arange(256)[:, None] + np.arange(columns // 32), low, high)
    scales = scales.astype(np.uint8)
    decoder = decoders(dtype, interpret=interpret)[int(interpret)]
    run = jax.jit(partial(scaled_product_in_a_kernel, decoder, interpret=interpret))
    rows = jnp.asarray(np.eye(columns), dtype)
    actual = np.asarray(run(pack_words(packed), scales, rows))
    np.testing.assert_array_equal(actual, oracles.mxfp4(packed, scales).astype(np.float32))


@pytest.mark.parametrize("column", [0, 31, 32, 1000])
def test_a_column_stands_where_the_weights_have_it(column):
    rows = in_weights_order(jnp.arange(1024)[None, :])
    assert int(rows[0, place_in_weights_order(jnp.int32(column))]) == column


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_product_is_exact_on_every_code_and_scale(dtype, impl):
    """Each of 16 rows picks one code; below scale 64 it is large, as the sums' range has an end.

    Scale 0 waits for a GPU: a CPU's arithmetic takes 2^-127 for zero.
    """
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = np.tile(codes[::2] | codes[1::2] << 4, (256, 1))
    scales = np.minimum(np.arange(256), 254).astype(np.uint8)[:, None]
    interpret = impl == "interpret"
    decoder = decoders(dtype, interpret=interpret)[int(interpret)]
    run = jax.jit(partial(product_in_a_kernel, decoder, interpret=interpret))
    for power, kept in ((30, slice(int(interpret), 64)), (0, slice(64, 255))):
        rows = jnp.asarray(2.0**power * np.eye(16, 32), dtype)
        actual = np.asarray(run(pack_words(packed), scales, rows))[kept]
        with np.errstate(over="ignore"):
            expected = oracles.mxfp4(packed, scales)[kept, :16] * 2.0**power
            expected = expected.astype(np.float32)
        np.testing.assert_array_equal(actual, expected)
