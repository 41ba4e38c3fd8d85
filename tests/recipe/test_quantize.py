"""The MXFP4 of training is the MXFP4 of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.recipe.quantize import fake_quantize, nearest_mxfp4
from pallas_kernels.mxfp4 import dequantize, pack_words, quantize


def decoded(x):
    packed, scales = quantize(x)
    return np.asarray(dequantize(pack_words(packed), jnp.asarray(scales)))


def test_equals_the_quantizer_of_checkpoints():
    rng = np.random.default_rng(0)
    spread = rng.normal(size=(64, 128)) * np.exp2(rng.integers(-20, 20, (64, 1)))
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7], (16, 64))
    ties *= rng.choice([-1, 1], ties.shape) * np.exp2(rng.integers(-4, 4, (16, 1)))
    edges = np.zeros((4, 32))
    edges[1, 3], edges[2, 5], edges[3, 7] = 1.75, -1.7499999, 2.0**-100
    for x in (spread, ties, edges):
        x = x.astype(np.float32)
        np.testing.assert_array_equal(np.asarray(jax.jit(nearest_mxfp4)(x)), decoded(x))


def test_equals_compressed_tensors(golden):
    with np.load(golden / "mxfp4" / "mxfp4.npz") as file:
        x, wanted = file["quant.x_bf16"], file["quant.dequant_ct"]
    np.testing.assert_array_equal(np.asarray(nearest_mxfp4(jnp.asarray(x))), wanted)


def test_the_gradient_goes_straight_through():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), jnp.float32)
    weight = jnp.arange(256, dtype=jnp.float32).reshape(4, 64)
    gradient = jax.grad(lambda x: jnp.sum(weight * fake_quantize(x)))(x)
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(weight))


def test_what_is_stored_is_stored_again():
    """Quantizing what was quantized changes nothing: the packed weights are the model."""
    x = decoded(np.random.default_rng(2).normal(size=(8, 96)).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(nearest_mxfp4(jnp.asarray(x))), x)
