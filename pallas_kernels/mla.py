"""Multi-head latent attention (MLA), absorbed form, over a paged latent cache without rotation.

Source: DeepSeek-V2 (arXiv 2405.04434); without rotation: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

import jax

from pallas_kernels.impl import Impl, require_impl
from pallas_kernels.mla_decode_pallas import mla_decode_pallas
from pallas_kernels.mla_prefill_pallas import mla_prefill_pallas
from pallas_kernels.mla_reference import mla_decode_reference, mla_prefill_reference


def mla_decode(
    q: jax.Array,  # [B, T, H, L+R]
    pages: jax.Array,  # [P, page, L+R]
    page_table: jax.Array,  # i32[B, max_pages]
    lengths: jax.Array,  # i32[B]
    *,
    latent: int,
    scale: float,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from the last T rows of each request to its cached latents.

    q is [q_nope w_uk | q_rope] and a cached row [latent | rope part]; its first L = `latent`
    columns are the value too. `lengths` counts the cached tokens, the T rows included: row t sees
    positions below lengths - T + t + 1. A request of length 0 gives zeros. A page id outside
    [0, P) among the pages in use, or a length beyond the page table, sets BIT_PAGE and is read as
    page 0, or cut. A NaN among the cached rows reaches those alone that see it.

    Returns (o [B, T, H, L] in q.dtype, flags bool[B] of requests with a non-finite row, health
    u32[]). Raises ValueError on misfit shapes.
    """
    require_impl("mla_decode", impl)
    _check("mla_decode", q, pages, latent)
    if impl == "reference":
        return mla_decode_reference(q, pages, page_table, lengths, latent=latent, scale=scale)
    return mla_decode_pallas(
        q, pages, page_table, lengths, latent=latent, scale=scale, interpret=impl == "interpret"
    )


def mla_prefill(
    q: jax.Array,  # [B, T, H, L+R]
    pages: jax.Array,  # [P, page, L+R]
    page_table: jax.Array,  # i32[B, max_pages]
    starts: jax.Array,  # i32[B]
    lengths: jax.Array,  # i32[B]
    *,
    latent: int,
    scale: float,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from the rows of a prompt chunk, already cached, to all before them and themselves.

    Row t of request b has position starts[b] + t and sees positions up to its own. Rows at
    lengths[b] and beyond are padding and give zeros. Otherwise as `mla_decode`.
    """
    require_impl("mla_prefill", impl)
    _check("mla_prefill", q, pages, latent)
    if impl == "reference":
        return mla_prefill_reference(
            q, pages, page_table, starts, lengths, latent=latent, scale=scale
        )
    return mla_prefill_pallas(
        q,
        pages,
        page_table,
        starts,
        lengths,
        latent=latent,
        scale=scale,
        interpret=impl == "interpret",
    )


def _check(op: str, q: jax.Array, pages: jax.Array, latent: int) -> None:
    if q.ndim != 4 or pages.ndim != 3 or q.shape[-1] != pages.shape[-1]:
        raise ValueError(
            f"{op} takes q[B,T,H,L+R], pages[P,page,L+R]; got {q.shape}, {pages.shape}"
        )
    if not 0 < latent <= q.shape[-1]:
        raise ValueError(f"{op} latent width {latent} lies outside [1, {q.shape[-1]}]")
