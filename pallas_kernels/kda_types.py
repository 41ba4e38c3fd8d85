"""Pytrees of the KDA ops."""

from __future__ import annotations

from dataclasses import dataclass

import jax

TAPS = 4  # of the short convolution, the current row included


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaWeights:
    """Small weights of a KDA layer, local to the rank; C = H(2K + V) is laid out [q | k | v]."""

    conv: jax.Array  # f32[4, C]; row 3 multiplies the current token
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
    """What replays the last step's rows, kept until it is known how many were accepted.

    `update` is beta (v - S k), S the decayed state that the row met: a replay is no more than
    S <- S diag(exp decay) + update key^T.
    """

    key: jax.Array  # [S, R, H, K] normalized, compute dtype
    update: jax.Array  # f32[S, R, H, V]
    decay: jax.Array  # f32[S, R, H, K] log decay


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaCache:
    """State of a KDA layer for every slot; slot 0 is the null slot.

    `conv` and `pending` are rings: the row at position p of a request lies at p mod R. A step
    reads rows before its own and writes its own, and the two never meet.
    """

    conv: jax.Array  # [S, R, C] raw projections, compute dtype
    state: jax.Array  # f32[S, H, V, K] before the pending rows
    pending: KdaPending


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaSnapshot:
    """What the rows after some position continue; N requests, nothing pending."""

    window: jax.Array  # [N, 3, C] raw projections of the rows before it, compute dtype
    state: jax.Array  # f32[N, H, V, K]


def ring_rows(most: int) -> int:
    """R of a cache whose steps bring up to `most` rows: a power of two.

    Room for the rows to replay, or for the convolution's past, beside the new ones.
    """
    return 1 << (max(2 * most, most + TAPS - 1) - 1).bit_length()


def most_rows(cache: KdaCache) -> int:
    """The most rows that a step may bring, and the next one replay."""
    ring = cache.conv.shape[1]
    return min(ring // 2, ring - TAPS + 1)
