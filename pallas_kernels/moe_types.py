"""Pytrees of the routed experts, local to the rank: [gate | up] in w13, down in w2."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4Bank:
    """Experts in MXFP4: words of eight codes and a scale per 32 columns (see mxfp4.py)."""

    w13: jax.Array  # u32[E, 2I, Z/8]
    w13_scale: jax.Array  # u8[E, 2I, Z/32]
    w2: jax.Array  # u32[E, Z, I/8]
    w2_scale: jax.Array  # u8[E, Z, I/32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBank:
    """Experts in bf16 or f32."""

    w13: jax.Array  # [E, 2I, Z]
    w2: jax.Array  # [E, Z, I]
