"""Latent attention's heads before and after the attention over latents."""

from __future__ import annotations

import jax

from pallas_kernels.impl import Impl, require_few_rows, require_impl
from pallas_kernels.mla_heads_pallas import mla_absorb_pallas, mla_values_pallas
from pallas_kernels.mla_heads_reference import mla_absorb_reference, mla_values_reference


def mla_absorb(
    query: jax.Array,  # [W, H*(N+R)]
    w_uk: jax.Array,  # [H, N, L]
    *,
    impl: Impl,
) -> jax.Array:
    """Return queries against latents, [W, H, L+R]: q_nope w_uk beside q_rope as it is.

    N is a head's width without its R rope dims. Raises ValueError on misfit shapes,
    NotImplementedError when the kernel is asked for more than 64 rows.
    """
    require_impl("mla_absorb", impl)
    heads, nope, _ = w_uk.shape
    if query.ndim != 2 or query.shape[1] % heads or query.shape[1] // heads < nope:
        raise ValueError(f"mla_absorb takes query[W,H*(N+R)], got {query.shape}, {w_uk.shape}")
    if impl == "reference":
        return mla_absorb_reference(query, w_uk)
    require_few_rows("mla_absorb", query.shape[0])
    return mla_absorb_pallas(query, w_uk, interpret=impl == "interpret")


def mla_values(
    mixed: jax.Array,  # [W, H, L]
    w_uv: jax.Array,  # [H, V, L]
    gate: jax.Array | None,  # [W, H*V]
    *,
    impl: Impl,
) -> jax.Array:
    """Return the heads' values w_uv mixed, times sigmoid(gate) if there is one; [W, H*V].

    Raises ValueError on misfit shapes, NotImplementedError when the kernel is asked for more than
    64 rows.
    """
    require_impl("mla_values", impl)
    heads, value_dim, latent = w_uv.shape
    if mixed.ndim != 3 or mixed.shape[1:] != (heads, latent):
        raise ValueError(f"mla_values takes mixed[W,H,L], got {mixed.shape}, {w_uv.shape}")
    if gate is not None and gate.shape != (mixed.shape[0], heads * value_dim):
        raise ValueError(f"mla_values takes gate[W,H*V], got {gate.shape}, {w_uv.shape}")
    if impl == "reference":
        return mla_values_reference(mixed, w_uv, gate)
    require_few_rows("mla_values", mixed.shape[0])
    return mla_values_pallas(mixed, w_uv, gate, interpret=impl == "interpret")
