"""MXFP4 decoding, packing and quantizing against what other packages recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mxfp4 import block_words, dequantize, pack_words, quantize, unpack_words

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


@pytest.mark.parametrize("columns", [32, 96, 256, 3584])
def test_words_hold_neighboring_columns_in_neighboring_words(columns):
    packed = np.random.default_rng(0).integers(0, 256, (2, 3, columns // 2), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(2, 3, columns)
    words = pack_words(packed)
    assert words.shape == (2, 3, columns // 8)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack_words(words), packed)
    block = block_words(columns // 8)
    for word in (0, 1, columns // 8 - 1):
        first = word // block * block * 8 + word % block
        nibbles = np.asarray(words)[..., word, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
        np.testing.assert_array_equal(nibbles, codes[..., first : first + 8 * block : block])


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
