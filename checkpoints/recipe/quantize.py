"""MXFP4 in the forward pass, with a gradient that goes straight through."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import GROUP

MOST_EXPONENT = 127  # of a scale, above or below zero
LARGEST_CODE = 6.0


def nearest_mxfp4(x: jax.Array) -> jax.Array:
    """What `pallas_kernels.mxfp4.quantize` and `dequantize` make of x f32[..., K]: f32[..., K].

    K is a multiple of 32. The steps between the codes are 0.5 below 2, 1 below 4 and 2 above, and
    in each of these ranges the even codes are the even multiples, so that rounding to the nearest
    multiple, ties to even, is rounding to the nearest code, ties to even.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    fraction, power = jnp.frexp(jnp.max(jnp.abs(groups), axis=-1, keepdims=True))
    exponent = power - 3 + (fraction >= 0.875).astype(power.dtype)
    exponent = jnp.where(
        fraction == 0, -MOST_EXPONENT, jnp.clip(exponent, -MOST_EXPONENT, MOST_EXPONENT)
    )
    exponent = jnp.broadcast_to(exponent, groups.shape)
    scaled = jnp.ldexp(jnp.abs(groups), -exponent)
    step = jnp.where(scaled < 2.0, 0.5, jnp.where(scaled < 4.0, 1.0, 2.0))
    code = jnp.minimum(jnp.round(scaled / step) * step, LARGEST_CODE)
    return (jnp.sign(groups) * jnp.ldexp(code, exponent)).reshape(x.shape)


@jax.custom_vjp
def fake_quantize(x: jax.Array) -> jax.Array:
    """`nearest_mxfp4`; its gradient is the identity (straight-through estimator)."""
    return nearest_mxfp4(x)


fake_quantize.defvjp(lambda x: (nearest_mxfp4(x), None), lambda _, cotangent: (cotangent,))
