"""Normalizations in plain jnp, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

L2_EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unnormed:
    """Rows whose G equal runs of columns still want dividing by their root mean square.

    A product can do it behind each run, so that who makes the rows needs no look at a whole run.
    """

    rows: jax.Array  # [..., D]
    squares: jax.Array  # f32[..., G, N] what to divide by: sums of squares, in N pieces

    def normed(self, eps: float) -> jax.Array:
        """The finished rows, [..., D] in their dtype; eps is added to the mean of the squares."""
        runs = self.rows.astype(jnp.float32).reshape(*self.squares.shape[:-1], -1)
        mean = jnp.sum(self.squares, axis=-1, keepdims=True) / runs.shape[-1]
        return (runs * lax.rsqrt(mean + eps)).reshape(self.rows.shape).astype(self.rows.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Divide by the root mean square over the last axis and scale by `weight`.

    x: [..., D]; weight: [D]. Returns x.dtype. eps is added to the mean of the squares.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scaled = wide * scale * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return scaled.astype(x.dtype)


def l2_norm(x: jax.Array) -> jax.Array:
    """Divide by the Euclidean norm over the last axis.

    x: [..., D]. Returns x.dtype. 1e-6 is added to the sum of the squares, inside the root.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + L2_EPS)
    return (wide * scale).astype(x.dtype)
