"""Pytrees of the KDA ops."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaWeights:
    """Small weights of a KDA layer, local to the rank; C = H(2K + V) is laid out [q | k | v]."""

    conv: jax.Array  # f32[C, 4]; [:, 3] multiplies the current token
    a_log: jax.Array  # f32[H]
    dt_bias: jax.Array  # f32[H*K]
    o_norm: jax.Array  # f32[V]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaRows:
    """The projections of a step's rows, in the compute dtype."""

    qkv: jax.Array  # [B, T, C] before the convolution
    decay: jax.Array  # [B, T, H*K] f_b(f_a(x)), before dt_bias
    beta: jax.Array  # [B, T, H] before the sigmoid
    gate: jax.Array  # [B, T, H*V] output gate, before the sigmoid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaPending:
    """The inputs of the last step's rows, kept until it is known how many were accepted."""

    conv: jax.Array  # [S, Q, C] raw projections, compute dtype
    key: jax.Array  # [S, Q, H, K] normalized, compute dtype
    value: jax.Array  # [S, Q, H, V] compute dtype
    decay: jax.Array  # f32[S, Q, H, K] log decay
    beta: jax.Array  # f32[S, Q, H] after the sigmoid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaCache:
    """State of a KDA layer for every slot; slot 0 is the null slot."""

    conv: jax.Array  # [S, 3, C] last raw projections, compute dtype
    state: jax.Array  # f32[S, H, K, V]
    pending: KdaPending
