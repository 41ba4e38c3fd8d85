"""Plain-jnp attention residuals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm import rms_norm


def attn_res_weights(
    blocks: jax.Array,  # [M, W, D]
    count: jax.Array,  # i32[]
    part: jax.Array,  # [W, D]
    query_norm: jax.Array,  # [D]
    query_proj: jax.Array,  # [D]
    *,
    eps: float,
) -> jax.Array:
    """Return the softmax weights of the mix, f32[W, M + 1]; the last one is `part`'s.

    Weights of blocks at or beyond `count` are zero.
    """
    query = query_norm.astype(jnp.float32) * query_proj.astype(jnp.float32)
    live = jnp.arange(blocks.shape[0]) < count
    block_scores = jnp.where(live[:, None], _scores(blocks, query, eps), -jnp.inf)
    scores = jnp.concatenate([block_scores, _scores(part[None], query, eps)])
    return jax.nn.softmax(scores, axis=0).T


def attn_res_mix(
    blocks: jax.Array,  # [M, W, D]
    count: jax.Array,  # i32[]
    part: jax.Array,  # [W, D]
    query_norm: jax.Array,  # [D]
    query_proj: jax.Array,  # [D]
    *,
    eps: float,
) -> jax.Array:
    """Return the mix of blocks[:count] and `part`, [W, D] in part.dtype."""
    return _mix(blocks, count, part, query_norm, query_proj, eps=eps).astype(part.dtype)


def attn_res_reference(
    blocks: jax.Array,
    count: jax.Array,
    part: jax.Array,
    query_norm: jax.Array,
    query_proj: jax.Array,
    norm: jax.Array,
    *,
    delta: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attn_res`."""
    if delta is not None:
        part = (part.astype(jnp.float32) + delta.astype(jnp.float32)).astype(part.dtype)
    mix = _mix(blocks, count, part, query_norm, query_proj, eps=eps)
    return rms_norm(mix, norm, eps=eps).astype(part.dtype), part


def _scores(values, query, eps):
    wide = values.astype(jnp.float32)  # [N, W, D]
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    return jnp.sum(wide * query[None, None], axis=-1) * scale


def _mix(blocks, count, part, query_norm, query_proj, *, eps):
    weights = attn_res_weights(blocks, count, part, query_norm, query_proj, eps=eps)
    live = (jnp.arange(blocks.shape[0]) < count)[:, None, None]
    # Zero the unused blocks: their weight is zero, but zero times NaN is not.
    values = jnp.where(live, blocks.astype(jnp.float32), 0.0)
    mixed = jnp.sum(values * weights.T[:-1, :, None], axis=0)
    return mixed + part.astype(jnp.float32) * weights[:, -1:]
