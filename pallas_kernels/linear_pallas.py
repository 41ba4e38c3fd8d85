"""Skinny linear layer on Triton: few rows, weights streamed once at memory speed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.linear_split_pallas import linear_split
from pallas_kernels.linear_tile_pallas import (
    PORTABLE_STAGES,
    LinearTiles,
    accumulate,
    gate_and_up,
    linear_tiles,
)
from pallas_kernels.norm import Unnormed

NAME = "linear_skinny"


def linear_pallas(
    x: jax.Array | Unnormed,  # [W, K]
    weight: jax.Array,  # [N, K]
    *,
    norm: jax.Array | None,
    eps: float,
    activation: Activation | None,
    add: jax.Array | None,
    out_dtype: jax.typing.DTypeLike | None,
    interpret: bool,
    tiles: LinearTiles | None = None,
) -> jax.Array:
    """See `pallas_kernels.linear`; W at most MOST_ROWS."""
    squares = x.squares if isinstance(x, Unnormed) else None
    x = x.rows if isinstance(x, Unnormed) else x
    features, depth = weight.shape
    columns = features // (1 if activation is None else 2)
    exact = jnp.float32 in (x.dtype, weight.dtype)
    run_of = None if squares is None else depth // squares.shape[1]
    tiles = tiles or linear_tiles(x.shape[0], depth, features, exact=exact, run=run_of)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if tiles.split > 1:
        return linear_split(
            x,
            weight,
            squares=squares,
            norm=norm,
            eps=eps,
            activation=activation,
            add=add,
            out_dtype=out_dtype,
            interpret=interpret,
            tiles=tiles,
        )
    optional = [each for each in (norm, squares, add) if each is not None]
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        eps=eps,
        activation=activation,
        has_norm=norm is not None,
        has_squares=squares is not None,
        has_add=add is not None,
    )

    def run(*operands, narrow, stages):
        return launch.launch(
            functools.partial(kernel, narrow=narrow),
            *operands,
            name=NAME,
            grid=(pl.cdiv(features, tiles.features),),
            out_shape=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
            interpret=interpret,
            num_warps=tiles.warps,
            num_stages=stages,
        )

    return launch.by_platform(
        x,
        weight,
        *optional,
        cuda=functools.partial(run, narrow=8, stages=tiles.stages),
        portable=functools.partial(run, narrow=16, stages=min(tiles.stages, PORTABLE_STAGES)),
        interpret=interpret,
    )


def _kernel(
    x_ref,  # [W, K]
    weight_ref,  # [N, K]
    *refs,  # norm [K], squares f32[W, G, N] and add [W, N'] if given; out [W, N']
    tiles: LinearTiles,
    narrow: int,  # the least side of the matrix unit
    eps: float,
    activation: Activation | None,
    has_norm: bool,
    has_squares: bool,
    has_add: bool,
):
    *given, out_ref = refs
    norm_ref = given.pop(0) if has_norm else None
    squares_ref = given.pop(0) if has_squares else None
    add_ref = given.pop(0) if has_add else None
    rows, depth = x_ref.shape
    columns = out_ref.shape[1]
    # Features beyond the end repeat the last one; what they give is not stored.
    row = jnp.arange(max(narrow, pl.next_power_of_2(rows)), dtype=jnp.int32)
    width = tiles.features // (1 if activation is None else 2)
    column = pl.program_id(0) * width + jnp.arange(width, dtype=jnp.int32)
    feature_at = jnp.minimum(column, columns - 1)
    if activation is not None:  # the gate's rows, then the same rows of up
        place = jnp.arange(tiles.features, dtype=jnp.int32)
        feature_at = jnp.minimum(pl.program_id(0) * width + place % width, columns - 1)
        feature_at += place // width * columns

    out, squares = accumulate(
        x_ref,
        weight_ref,
        row,
        feature_at,
        steps=depth // tiles.depth,
        depth=tiles.depth,
        norm_ref=norm_ref,
        squares_ref=squares_ref,
        eps=eps,
    )
    if has_norm:
        out *= lax.rsqrt(squares / depth + eps)[None, :]
    if activation is not None:
        out = gated(activation, *gate_and_up(out))
    mask = (column < columns)[:, None] & (row < rows)[None, :]

    def spread(row, column):
        return tuple(jnp.broadcast_to(axis, out.shape) for axis in (row[None, :], column[:, None]))

    if add_ref is not None:
        at = add_ref.at[spread(jnp.minimum(row, rows - 1), jnp.minimum(column, columns - 1))]
        out += launch.load(at).astype(jnp.float32)
    # Not the clamped indices: a masked row must not stand for the last one.
    launch.store(out_ref.at[spread(row, column)], out.astype(out_ref.dtype), mask=mask)
