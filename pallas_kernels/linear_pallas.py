"""Skinny linear layer on Triton: few rows, weights streamed once at memory speed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated

SHARED_BYTES = 200 << 10  # of a multiprocessor of compute capability 9.0, less some
PORTABLE_STAGES = 2  # AMD's pipeline holds one step ahead, in registers
NAME = "linear_skinny"


@dataclasses.dataclass(frozen=True)
class LinearTiles:
    """Tile sizes of one launch; weights are the dot's left operand, rows the narrow right one."""

    features: int  # rows of the weight in one program
    depth: int  # columns of K in one step of the loop
    warps: int
    stages: int  # steps in flight


def linear_tiles(rows: int, depth: int, features: int, *, exact: bool) -> LinearTiles:
    """Choose tiles for x[rows, depth] and weights [features, depth]; `exact`: a float32 product.

    Wide tiles suit many features; few features leave multiprocessors idle unless tiles are narrow,
    and then each program needs more bytes in flight. Measured in benchmarks/RESULTS.md.
    """
    step = depth & -depth  # the largest power of two that divides K: no masks inside the loop
    if exact:
        return LinearTiles(16, min(step, 64), 4, 1)
    if features >= 4096:
        tiles = LinearTiles(64, min(step, 256), 4, 4)
    elif features >= 2048:
        tiles = LinearTiles(32, min(step, 128), 2, 12)
    else:
        tiles = LinearTiles(16, min(step, 512), 2, 4)
    bytes_in_flight = (tiles.features + max(8, pl.next_power_of_2(rows))) * tiles.depth * 2
    return dataclasses.replace(tiles, stages=min(tiles.stages, SHARED_BYTES // bytes_in_flight))


def linear_pallas(
    x: jax.Array,  # [W, K]
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
    features, depth = weight.shape
    columns = features // (1 if activation is None else 2)
    exact = jnp.float32 in (x.dtype, weight.dtype)
    tiles = tiles or linear_tiles(x.shape[0], depth, features, exact=exact)
    optional = [each for each in (norm, add) if each is not None]
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        eps=eps,
        activation=activation,
        has_norm=norm is not None,
        has_add=add is not None,
    )

    def run(*operands, narrow, stages):
        return launch.launch(
            functools.partial(kernel, narrow=narrow),
            *operands,
            name=NAME,
            grid=(pl.cdiv(features, tiles.features),),
            out_shape=jax.ShapeDtypeStruct(
                (x.shape[0], columns), x.dtype if out_dtype is None else out_dtype
            ),
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
    *refs,  # norm [K] and add [W, N'] if given; out [W, N']
    tiles: LinearTiles,
    narrow: int,  # the least side of the matrix unit
    eps: float,
    activation: Activation | None,
    has_norm: bool,
    has_add: bool,
):
    norm_ref = refs[0] if has_norm else None
    add_ref = refs[int(has_norm)] if has_add else None
    out_ref = refs[-1]
    rows, depth = x_ref.shape
    columns = out_ref.shape[1]
    exact = jnp.float32 in (x_ref.dtype, weight_ref.dtype)
    # Rows and features beyond the end repeat the last one; what they give is not stored.
    row = jnp.arange(max(narrow, pl.next_power_of_2(rows)), dtype=jnp.int32)
    row_at = jnp.minimum(row, rows - 1)
    width = tiles.features // (1 if activation is None else 2)
    column = pl.program_id(0) * width + jnp.arange(width, dtype=jnp.int32)
    feature_at = jnp.minimum(column, columns - 1)
    if activation is not None:  # the gate's rows, then the same rows of up
        place = jnp.arange(tiles.features, dtype=jnp.int32)
        feature_at = jnp.minimum(pl.program_id(0) * width + place % width, columns - 1)
        feature_at += place // width * columns

    def step(index, carry):
        out, squares = carry
        at = index * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
        weight = launch.load(weight_ref.at[launch.mesh(feature_at, at)])
        x = launch.load(x_ref.at[launch.mesh(row_at, at)])
        if norm_ref is not None:
            wide = x.astype(jnp.float32)
            squares += jnp.sum(wide * wide, axis=1)
            scale = launch.load(norm_ref.at[at]).astype(jnp.float32)
            x = (wide * scale[None]).astype(x.dtype)
        if exact:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        out += lax.dot_general(
            weight,
            x,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
        return out, squares

    zeros = jnp.zeros((tiles.features, row.size), jnp.float32)
    squares = jnp.zeros(row.size, jnp.float32)
    out, squares = lax.fori_loop(0, depth // tiles.depth, step, (zeros, squares))
    if has_norm:
        out *= lax.rsqrt(squares / depth + eps)[None, :]
    if activation is not None:
        halves = out.reshape(2, width, row.size)
        first = (jnp.arange(2, dtype=jnp.int32) == 0)[:, None, None]
        gate = jnp.sum(jnp.where(first, halves, 0.0), axis=0)
        up = jnp.sum(jnp.where(first, 0.0, halves), axis=0)
        out = gated(activation, gate, up)
    mask = (column < columns)[:, None] & (row < rows)[None, :]

    def spread(row, column):
        return tuple(jnp.broadcast_to(axis, out.shape) for axis in (row[None, :], column[:, None]))

    if add_ref is not None:
        at = add_ref.at[spread(row_at, jnp.minimum(column, columns - 1))]
        out += launch.load(at).astype(jnp.float32)
    # Not the clamped indices: a masked row must not stand for the last one.
    launch.store(out_ref.at[spread(row, column)], out.astype(out_ref.dtype), mask=mask)
