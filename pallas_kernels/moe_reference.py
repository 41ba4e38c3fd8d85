"""Plain-jnp router and routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import Activation, gated
from pallas_kernels.linear_reference import dot_f32
from pallas_kernels.moe_groups import group_pairs
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.mxfp4 import dequantize

SUM_EPS = 1e-20
WIDEST_TILE = 64  # rows of one expert worked on at once


def route_reference(
    x: jax.Array, weight: jax.Array, bias: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.route`."""
    return choose_reference(dot_f32(x, weight), bias, **options)


def choose_reference(
    logits: jax.Array, bias: jax.Array, *, top_k: int, scaling: float, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.choose`."""
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias[None]
    # NaN sorts last. A negative zero would sort below a zero, though they tie.
    ranked = jnp.where(jnp.isnan(biased), -jnp.inf, jnp.where(biased == 0, 0.0, biased))
    _, experts = lax.top_k(ranked, top_k)
    chosen = jnp.take_along_axis(scores, experts, axis=1)
    if renormalize:
        chosen = chosen / (jnp.sum(chosen, axis=1, keepdims=True) + SUM_EPS)
    return experts, chosen * scaling


def moe_reference(
    z: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    bank: Mxfp4Bank | DenseBank,
    *,
    activation: Activation,
) -> jax.Array:
    """See `pallas_kernels.moe`."""
    count = bank.w13.shape[0]
    rows, choices = experts.shape
    tile = _tile(rows, choices, count)
    groups = group_pairs(experts, count, tile)

    def body(index, out):
        pair = groups.pairs[index]
        row = pair // choices  # an unused place is of row W
        tile_z = z.at[row].get(mode="fill", fill_value=0)
        weight = weights.reshape(-1).at[pair].get(mode="fill", fill_value=0)
        y = _expert(tile_z, bank, groups.expert[index], activation) * weight[:, None]
        return out.at[row].add(y, mode="drop")

    return lax.fori_loop(0, groups.used, body, jnp.zeros(z.shape, jnp.float32))


def _tile(rows: int, choices: int, experts: int) -> int:
    """Rows per tile: a power of two near four times an expert's mean load."""
    load = max(4, 4 * rows * choices // experts)
    return min(rows, WIDEST_TILE, 1 << (load - 1).bit_length())


def _expert(
    x: jax.Array, bank: Mxfp4Bank | DenseBank, expert: jax.Array, activation: Activation
) -> jax.Array:
    """Apply one expert to the rows of a tile: [tile, Z] -> f32[tile, Z]."""
    one = jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, expert, axis=0, keepdims=False), bank
    )
    if isinstance(one, Mxfp4Bank):
        w13 = dequantize(one.w13, one.w13_scale, x.dtype)
        w2 = dequantize(one.w2, one.w2_scale, x.dtype)
    else:
        w13, w2 = one.w13, one.w2
    gate, up = jnp.split(dot_f32(x, w13), 2, axis=1)
    return dot_f32(gated(activation, gate, up).astype(x.dtype), w2)
