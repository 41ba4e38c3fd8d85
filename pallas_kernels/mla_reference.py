"""Plain-jnp latent attention: online softmax over groups of pages up to the longest length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.health import BIT_PAGE
from pallas_kernels.kda_common import nonfinite_requests

GROUP_POSITIONS = 512  # cached rows read per iteration: short contexts take one
ROW_BLOCK = 128  # prompt rows attended at once: bounds the score buffer


def mla_decode_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    latent: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla_decode`."""
    rows = q.shape[1]
    page_table, health = _check_pages(page_table, pages, lengths)
    seen = lengths[:, None] - rows + 1 + jnp.arange(rows, dtype=jnp.int32)[None]
    out = _attend(q, pages, page_table, seen, latent=latent, scale=scale)
    return out, nonfinite_requests(out, lengths > 0), health


def mla_prefill_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    latent: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla_prefill`."""
    rows = q.shape[1]
    block = min(rows, ROW_BLOCK)
    lengths = jnp.clip(lengths, 0, rows)
    page_table, health = _check_pages(
        page_table, pages, jnp.where(lengths > 0, starts + lengths, 0)
    )
    q = jnp.pad(q, ((0, 0), (0, -rows % block), (0, 0), (0, 0)))

    def body(index, out):
        row = index * block + jnp.arange(block, dtype=jnp.int32)[None]
        seen = jnp.where(row < lengths[:, None], starts[:, None] + row + 1, 0)
        q_block = lax.dynamic_slice_in_dim(q, index * block, block, axis=1)
        block_out = _attend(q_block, pages, page_table, seen, latent=latent, scale=scale)
        return lax.dynamic_update_slice_in_dim(out, block_out, index * block, axis=1)

    blocks = (jnp.max(lengths) + block - 1) // block
    out = lax.fori_loop(0, blocks, body, jnp.zeros((*q.shape[:3], latent), q.dtype))[:, :rows]
    return out, nonfinite_requests(out, lengths > 0), health


def _check_pages(page_table, pages, lengths):
    """Return the table with bad page ids replaced by the null page, and the health word."""
    page = pages.shape[1]
    used = jnp.arange(page_table.shape[1], dtype=jnp.int32)[None] * page < lengths[:, None]
    bad = (page_table < 0) | (page_table >= pages.shape[0])
    beyond = lengths > page_table.shape[1] * page
    health = jnp.where(jnp.any(bad & used) | jnp.any(beyond), BIT_PAGE, 0).astype(jnp.uint32)
    return jnp.where(bad, 0, page_table), health


def _attend(
    q: jax.Array,  # [B, T, H, L+R]
    pages: jax.Array,  # [P, page, L+R]
    page_table: jax.Array,  # i32[B, max_pages]
    seen: jax.Array,  # i32[B, T] cached positions each row sees
    *,
    latent: int,
    scale: float,
) -> jax.Array:
    """Softmax attention of each row over its first `seen` positions; zeros where there are none."""
    batch, rows, heads, _ = q.shape
    page = pages.shape[1]
    per_group = min(-(-GROUP_POSITIONS // page), page_table.shape[1])
    missing = -page_table.shape[1] % per_group
    seen = jnp.clip(seen, 0, (page_table.shape[1] + missing) * page)
    # With a group to spare no group is known ahead, and its pages are read inside the loop. Read
    # before it, XLA fuses the write of a single row into the read, and copies the pool for that.
    page_table = jnp.pad(page_table, ((0, 0), (0, missing + per_group)))
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def body(group, carry):
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(page_table, group * per_group, per_group, axis=1)
        position = group * per_group * page + jnp.arange(per_group * page, dtype=jnp.int32)
        visible = position[None, None] < seen[..., None]  # [B, T, N]
        # Unwritten rows may hold NaN, which a zero probability would not silence.
        written = jnp.any(visible, axis=1)[..., None]
        cached = jnp.where(written, pages[ids].reshape(batch, per_group * page, -1), 0)
        scores = _dot("bthd,bnd->bthn", q, cached, precision) * scale
        scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(top - shift)
        # A later row of the step may hold NaN too. Who sees it has it in the scores.
        value = cached[..., :latent]
        value = jnp.where(jnp.isfinite(value), value, 0)
        values = _dot("bthn,bnl->bthl", weight.astype(q.dtype), value, precision)
        total = total * rescale + jnp.sum(weight, axis=-1)
        return new_top, total, acc * rescale[..., None] + values

    groups = (jnp.max(seen) + per_group * page - 1) // (per_group * page)
    empty = (
        jnp.full((batch, rows, heads), -jnp.inf, jnp.float32),
        jnp.zeros((batch, rows, heads), jnp.float32),
        jnp.zeros((batch, rows, heads, latent), jnp.float32),
    )
    _, total, acc = lax.fori_loop(0, groups, body, empty)
    return (acc / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)


def _dot(spec, left, right, precision):
    return jnp.einsum(spec, left, right, precision=precision, preferred_element_type=jnp.float32)
