"""Causal latent attention of prompt chunks over paged latents, as one Pallas kernel.

The products are the absorbed ones: 2 T H N (2L + R) floating-point operations for N positions, all
on the cached rows as they are. Short chunks over long contexts are cut into ranges as in decode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mla_decode_pallas import attend_pages


def mla_prefill_pallas(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    latent: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla_prefill`."""
    valid = jnp.clip(lengths, 0, q.shape[1])
    return attend_pages(
        q, pages, page_table, starts, valid,
        latent=latent, scale=scale, name="mla_prefill", interpret=interpret,
    )  # fmt: skip
