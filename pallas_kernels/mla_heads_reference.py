"""Plain-jnp products of latent attention's heads with their own matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mla_absorb_reference(query: jax.Array, w_uk: jax.Array) -> jax.Array:
    """See `pallas_kernels.mla_absorb`."""
    heads, nope, _ = w_uk.shape
    query = query.reshape(query.shape[0], heads, -1)
    absorbed = _per_head("whn,hnl->whl", query[..., :nope], w_uk).astype(query.dtype)
    return jnp.concatenate([absorbed, query[..., nope:]], axis=-1)


def mla_values_reference(mixed: jax.Array, w_uv: jax.Array, gate: jax.Array | None) -> jax.Array:
    """See `pallas_kernels.mla_values`."""
    heads = _per_head("whl,hvl->whv", mixed, w_uv).reshape(mixed.shape[0], -1)
    if gate is not None:
        heads *= jax.nn.sigmoid(gate.astype(jnp.float32))
    return heads.astype(mixed.dtype)


def _per_head(equation: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Product of x and weights, batched over heads; sums and result in float32.

    The factors too: XLA's CPU backend lacks some products of bfloat16 with float32 sums, and sums
    in bfloat16 where that is the result.
    """
    return jnp.einsum(
        equation,
        x.astype(jnp.float32),
        weights.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )
