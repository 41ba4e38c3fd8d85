"""Plain-jnp linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import Activation, gated
from pallas_kernels.norm import rms_norm


def dot_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contract the last axes, accumulating in float32.

    x: [W, K]; weight: [N, K]; bf16 or f32 each. Returns f32[W, N]. If either is f32 the other is
    raised to f32 (exactly) and the product runs at the highest precision.
    """
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def linear_reference(
    x: jax.Array,  # [W, K]
    weight: jax.Array,  # [N, K]
    *,
    norm: jax.Array | None,
    eps: float,
    activation: Activation | None,
    add: jax.Array | None,
    out_dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """See `pallas_kernels.linear`."""
    if norm is not None:
        x = rms_norm(x, norm, eps=eps)
    out = dot_f32(x, weight)
    if activation is not None:
        gate, up = jnp.split(out, 2, axis=1)
        out = gated(activation, gate, up)
    if add is not None:
        out = out + add.astype(jnp.float32)
    return out.astype(x.dtype if out_dtype is None else out_dtype)
