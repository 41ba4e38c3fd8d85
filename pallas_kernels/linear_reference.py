"""Plain-jnp linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import Activation, gated
from pallas_kernels.norm import Unnormed, rms_norm


@jax.custom_vjp
def dot_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contract the last axes, accumulating in float32.

    x: [W, K]; weight: [N, K]; bf16 or f32 each. Returns f32[W, N]. If either is f32 the other is
    raised to f32 (exactly) and the product runs at the highest precision. The gradient's products
    are of the same kind: a cotangent is rounded to bf16 where both factors are.
    """
    return _contract(x, weight, (1, 1))


def _contract(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Sum over one axis of each matrix, in float32."""
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _dot_backward(
    kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    cotangent = cotangent.astype(x.dtype if x.dtype == weight.dtype else jnp.float32)
    of_x, of_weight = _contract(cotangent, weight, (1, 0)), _contract(cotangent, x, (0, 0))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


dot_f32.defvjp(lambda x, weight: (dot_f32(x, weight), (x, weight)), _dot_backward)


def linear_reference(
    x: jax.Array | Unnormed,  # [W, K]
    weight: jax.Array,  # [N, K]
    *,
    norm: jax.Array | None,
    eps: float,
    activation: Activation | None,
    add: jax.Array | None,
    out_dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """See `pallas_kernels.linear`."""
    if isinstance(x, Unnormed):
        x = x.normed(eps)
    if norm is not None:
        x = rms_norm(x, norm, eps=eps)
    out = dot_f32(x, weight)
    if activation is not None:
        gate, up = jnp.split(out, 2, axis=1)
        out = gated(activation, gate, up)
    if add is not None:
        out = out + add.astype(jnp.float32)
    return out.astype(x.dtype if out_dtype is None else out_dtype)
