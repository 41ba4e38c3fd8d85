"""Products of bf16 or f32 weights in a program of one warp.

Weights pass through registers, a tile ahead of the one in work, and need no copies on their way in
shared memory: many small programs share a multiprocessor with those of the MXFP4 tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.loops import run_ahead


def products(x_ref, weight_ref, row, feature, first, tiles, depth) -> jax.Array:
    """Products over `tiles` tiles of `depth` columns from tile `first`: f32[features, rows].

    row: i32[R] of x_ref; feature: i32[n] of weight_ref.
    """
    exact = jnp.float32 in (x_ref.dtype, weight_ref.dtype)

    def load(tile):
        column = (first + tile) * depth + jnp.arange(depth, dtype=jnp.int32)
        weight = launch.load(weight_ref.at[launch.mesh(feature, column)])
        return weight, launch.load(x_ref.at[launch.mesh(row, column)])

    def add(tile, loaded, sums):
        del tile
        weight, x = (side.astype(jnp.float32) for side in loaded) if exact else loaded
        return sums + lax.dot_general(
            weight,
            x,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )

    return run_ahead(load, add, tiles, jnp.zeros((feature.size, row.size), jnp.float32))
