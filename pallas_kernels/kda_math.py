"""Elementwise functions of the KDA kernels: NVIDIA's own instructions, or plain jnp.

Pallas takes exponentials and roots that keep denormals, four instructions each, and never fuses a
multiplication and an addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Maths:
    """Functions of f32 arrays; `native`: as NVIDIA's instructions, which flush denormals."""

    native: bool

    def _run(self, instruction: str, x: jax.Array) -> jax.Array:
        [result] = launch.inline_asm(
            f"{instruction} $0, $1;",
            args=[x],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return result

    def _takes(self, x: jax.Array) -> bool:
        return self.native and x.ndim > 0  # the assembly takes no scalar

    def exp2(self, x: jax.Array) -> jax.Array:
        return self._run("ex2.approx.ftz.f32", x) if self._takes(x) else jnp.exp2(x)

    def exp(self, x: jax.Array) -> jax.Array:
        return self.exp2(LOG2_E * x) if self._takes(x) else jnp.exp(x)

    def rsqrt(self, x: jax.Array) -> jax.Array:
        return self._run("rsqrt.approx.ftz.f32", x) if self._takes(x) else lax.rsqrt(x)

    def fma(self, x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        if not self._takes(z):
            return x * y + z
        shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
        return launch.multiply_add(*(jnp.broadcast_to(each, shape) for each in (x, y, z)))

    def fma_bf16(self, x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        """x y + z of bf16 x, an even number of whose elements each thread holds together."""
        if not self._takes(z) or x.dtype != jnp.bfloat16:
            return self.fma(x.astype(jnp.float32), y, z)
        shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
        [result] = launch.inline_asm(
            """{
            .reg .b32 low, high;
            shl.b32 low, $2, 16;
            and.b32 high, $2, 0xffff0000;
            fma.rn.f32 $0, low, $3, $5;
            fma.rn.f32 $1, high, $4, $6;
            }""",
            args=[jnp.broadcast_to(arg, shape) for arg in (x, y, z)],
            constraints="=f,=f,r,f,f,f,f",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )
        return result

    def sigmoid(self, x: jax.Array) -> jax.Array:
        """1 / (1 + exp(-x)) without a division."""
        if self._takes(x):
            return self._run("rcp.approx.ftz.f32", 1.0 + self.exp2(-LOG2_E * x))
        root = self.rsqrt(1.0 + self.exp2(-LOG2_E * x))
        return root * root
