"""Gated activations: SiTU (Kimi-K3) and SiLU (Kimi-Linear)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Activation:
    """A gated activation of a feed-forward block.

    `beta` and `linear_beta` bound the gate and the up branch of SiTU; SiLU ignores them.
    Raises ValueError for an unknown kind.
    """

    kind: Literal["situ", "silu"]
    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self) -> None:
        if self.kind not in ("situ", "silu"):
            raise ValueError(f"activation kind {self.kind!r} is neither 'situ' nor 'silu'")


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Apply the activation to `gate` and multiply by `up`.

    gate, up: f32 of one shape. Returns f32 of that shape.
    situ: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta); silu: g sigmoid(g) u.
    """
    if activation.kind == "silu":
        return jax.nn.silu(gate) * up
    bounded_gate = activation.beta * jnp.tanh(gate / activation.beta)
    bounded_up = activation.linear_beta * jnp.tanh(up / activation.linear_beta)
    return bounded_gate * jax.nn.sigmoid(gate) * bounded_up
