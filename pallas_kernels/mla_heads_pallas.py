"""Products of latent attention's heads with their own matrices on Triton, few rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch

ABSORB_NAME, VALUES_NAME = "mla_absorb", "mla_values"
LEAST_ROWS = 16  # of a matrix product's left side
LATENTS = 128  # columns of one program of mla_absorb: some 60 programs for 12 heads
VALUES = 32  # columns of one program of mla_values


def _tile(size: int, most: int) -> int:
    """The largest power of two up to `most` that covers, or divides, `size`."""
    return min(most, pl.next_power_of_2(size))


def _axis(size: int, least: int = 1):
    """Indices that cover an axis, and the same clamped to it.

    Loads take the clamped ones, stores the others: a masked one must not stand for the last.
    """
    index = jnp.arange(max(least, pl.next_power_of_2(size)), dtype=jnp.int32)
    return index, _clamped(index, size)


def _clamped(index, size: int, tile: int | None = None):
    """`index` within an axis that tiles (default: its own length) may not fill.

    Where they do it stays as it is: a minimum hides from Triton that neighbors are neighbors, and
    it would load one number at a time.
    """
    return jnp.minimum(index, size - 1) if size % (tile or index.size) else index


def _zeros_beyond(block, inner, size: int):
    """`block` with zeros in the columns that are none."""
    if inner.size == size:
        return block
    return jnp.where((inner < size)[None, :], block, jnp.zeros_like(block))


def _product(left, right, contract):
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right.astype(left.dtype),
        (contract, ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _store(ref, index, value, mask):
    """Store a [rows, columns] block at (row i32[r], *scalars, column i32[c])."""
    row, *lead, column = index
    at = (
        jnp.broadcast_to(row[:, None], value.shape),
        *lead,
        jnp.broadcast_to(column[None, :], value.shape),
    )
    launch.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def mla_absorb_pallas(query: jax.Array, w_uk: jax.Array, *, interpret: bool) -> jax.Array:
    """See `pallas_kernels.mla_absorb`; W at most MOST_ROWS."""
    heads, nope, latent = w_uk.shape
    rope = query.shape[1] // heads - nope
    tile = _tile(latent, LATENTS)
    return launch.launch(
        functools.partial(_absorb_kernel, tile=tile),
        query,
        w_uk,
        name=ABSORB_NAME,
        grid=(heads, pl.cdiv(latent, tile) + (rope > 0)),
        out_shape=jax.ShapeDtypeStruct((query.shape[0], heads, latent + rope), query.dtype),
        interpret=interpret,
    )


def _absorb_kernel(
    query_ref,  # [W, H*(N+R)]
    w_uk_ref,  # [H, N, L]
    out_ref,  # out [W, H, L+R]
    *,
    tile: int,
):
    head, index = pl.program_id(0), pl.program_id(1)
    heads, nope, latent = w_uk_ref.shape
    width = query_ref.shape[1] // heads
    rows = query_ref.shape[0]
    row, row_at = _axis(rows, LEAST_ROWS)
    tiles = pl.cdiv(latent, tile)

    @pl.when(index < tiles)
    def _():
        inner, inner_at = _axis(nope)
        query = launch.load(query_ref.at[launch.mesh(row_at, head * width + inner_at)])
        query = _zeros_beyond(query, inner, nope)
        column = index * tile + jnp.arange(tile, dtype=jnp.int32)
        at = launch.mesh(head, inner_at, _clamped(column, latent))
        out = _product(query, launch.load(w_uk_ref.at[at]), ((1,), (0,)))
        mask = (row < rows)[:, None] & (column < latent)[None, :]
        _store(out_ref, (row, head, column), out, mask)

    if width > nope:  # the rope dims go along as they are

        @pl.when(index == tiles)
        def _():
            inner, inner_at = _axis(width - nope)
            at = launch.mesh(row_at, head * width + nope + inner_at)
            mask = (row < rows)[:, None] & (inner < width - nope)[None, :]
            _store(out_ref, (row, head, latent + inner), launch.load(query_ref.at[at]), mask)


def mla_values_pallas(
    mixed: jax.Array, w_uv: jax.Array, gate: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """See `pallas_kernels.mla_values`; W at most MOST_ROWS."""
    heads, value_dim, _ = w_uv.shape
    tile = _tile(value_dim, VALUES)
    return launch.launch(
        functools.partial(_values_kernel, tile=tile, gated=gate is not None),
        mixed,
        w_uv,
        *([] if gate is None else [gate]),
        name=VALUES_NAME,
        grid=(heads, pl.cdiv(value_dim, tile)),
        out_shape=jax.ShapeDtypeStruct((mixed.shape[0], heads * value_dim), mixed.dtype),
        interpret=interpret,
    )


def _values_kernel(
    mixed_ref,  # [W, H, L]
    w_uv_ref,  # [H, V, L]
    *refs,  # gate [W, H*V] if there is one; out [W, H*V]
    tile: int,
    gated: bool,
):
    head, index = pl.program_id(0), pl.program_id(1)
    _, value_dim, latent = w_uv_ref.shape
    rows = mixed_ref.shape[0]
    row, row_at = _axis(rows, LEAST_ROWS)
    inner, inner_at = _axis(latent)
    mixed = launch.load(mixed_ref.at[launch.mesh(row_at, head, inner_at)])
    mixed = _zeros_beyond(mixed, inner, latent)
    value = index * tile + jnp.arange(tile, dtype=jnp.int32)
    value_at = _clamped(value, value_dim)
    weights = launch.load(w_uv_ref.at[launch.mesh(head, value_at, inner_at)])
    out = _product(mixed, weights, ((1,), (1,)))
    if gated:
        gate = launch.load(refs[0].at[launch.mesh(row_at, head * value_dim + value_at)])
        out *= jax.nn.sigmoid(gate.astype(jnp.float32))
    mask = (row < rows)[:, None] & (value < value_dim)[None, :]
    _store(refs[-1], (row, head * value_dim + value), out, mask)
