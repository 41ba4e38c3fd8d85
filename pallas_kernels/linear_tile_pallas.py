"""One tile of a skinny linear layer on Triton: its size, its loop over K, its gate and up."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch

SHARED_BYTES = 200 << 10  # of a multiprocessor of compute capability 9.0, less some
MULTIPROCESSORS = 132  # of an H200; an MI300X and an MI355X have more
PORTABLE_STAGES = 2  # AMD's pipeline holds one step ahead, in registers


@dataclasses.dataclass(frozen=True)
class LinearTiles:
    """Tile sizes of one launch; weights are the dot's left operand, rows the narrow right one."""

    features: int  # rows of the weight in one program
    depth: int  # columns of K in one step of the loop
    warps: int
    stages: int  # steps in flight
    split: int = 1  # programs that share the K of a tile; a second launch adds what they give


def linear_tiles(
    rows: int, depth: int, features: int, *, exact: bool, run: int | None = None
) -> LinearTiles:
    """Choose tiles for x[rows, depth] and weights [features, depth]; `exact`: a float32 product.

    With `run`, a step's columns lie in one of the depth's runs of so many columns.

    Every multiprocessor wants a program with its bytes in flight: with few features K is split.
    A second launch costs 1.0 us on an H200. Measured in benchmarks/RESULTS.md.
    """
    # The largest power of two that divides K, or its runs: no masks inside the loop.
    step = (run or depth) & -(run or depth)
    if exact:
        return LinearTiles(16, min(step, 64), 4, 1)
    if depth <= 256:
        return LinearTiles(16, step, 2, 1)
    # 64 rows and 256 columns would need more than the 64 KiB that gfx942 has.
    tiles = LinearTiles(64, min(step, 256 if rows <= 32 else 128), 4, 8 if run else 4)
    programs, steps = pl.cdiv(features, tiles.features), depth // tiles.depth
    if programs <= MULTIPROCESSORS // 2:
        split = max(each for each in range(1, MULTIPROCESSORS // programs + 1) if steps % each == 0)
        tiles = dataclasses.replace(tiles, split=split)
    bytes_in_flight = (tiles.features + max(8, pl.next_power_of_2(rows))) * tiles.depth * 2
    return dataclasses.replace(tiles, stages=min(tiles.stages, SHARED_BYTES // bytes_in_flight))


def accumulate(
    x_ref,  # [W, K]
    weight_ref,  # [N, K]
    row,  # i32[R], of which those beyond W are zeros
    feature_at,  # i32[F]
    *,
    steps,
    depth,
    first=0,
    norm_ref=None,  # [K]
    squares_ref=None,  # f32[W, G, N]
    eps=0.0,
):
    """Products of R rows and F features over `steps` tiles of `depth` columns from tile `first`.

    Returns (f32[F, R], f32[R]: the sums of x's squares if there is a norm, else 0).
    With a norm, x is scaled by its weight alone: the caller divides by the root mean square. With
    squares_ref each step's products are divided by that of their run of columns.
    """
    exact = jnp.float32 in (x_ref.dtype, weight_ref.dtype)
    rows = x_ref.shape[0]
    if squares_ref is not None:
        runs = squares_ref.shape[1]
        run, roots = inverse_roots(squares_ref, jnp.minimum(row, rows - 1), x_ref.shape[1], eps)

    def load_rows(at):
        place = x_ref.at[launch.mesh(row, at)]
        if row.size == rows:
            return launch.load(place)
        # Not a row that is there once more: at 1 row all programs would ask for one line 8 times.
        mask = jnp.broadcast_to((row < rows)[:, None], (row.size, depth))
        return launch.load(place, mask=mask, other=0.0)

    def step(index, carry):
        out, squares = carry
        at = (first + index) * depth + jnp.arange(depth, dtype=jnp.int32)
        weight = launch.load(weight_ref.at[launch.mesh(feature_at, at)])
        x = load_rows(at)
        if norm_ref is not None:
            wide = x.astype(jnp.float32)
            squares += jnp.sum(wide * wide, axis=1)
            scale = launch.load(norm_ref.at[at]).astype(jnp.float32)
            x = (wide * scale[None]).astype(x.dtype)
        if exact:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        product = lax.dot_general(
            weight,
            x,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
        if squares_ref is not None:
            here = run == (first + index) * depth // (x_ref.shape[1] // runs)
            product *= jnp.sum(jnp.where(here[None], roots, 0.0), axis=1)[None]
        return out + product, squares

    zeros = jnp.zeros((feature_at.size, row.size), jnp.float32)
    return lax.fori_loop(0, steps, step, (zeros, jnp.zeros(row.size, jnp.float32)))


def inverse_roots(squares_ref, row_at, depth, eps):
    """One over the root mean squares of the runs of `depth` columns: (i32[G'] runs, f32[R, G'])."""
    count, pieces = squares_ref.shape[1:]
    run = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    index = (row_at, jnp.minimum(run, count - 1))
    parts = [launch.load(squares_ref.at[launch.mesh(*index, piece)]) for piece in range(pieces)]
    return run, lax.rsqrt(functools.reduce(jnp.add, parts) * (count / depth) + eps)


def gate_and_up(out):
    """Part the products f32[2 n, rows] of gate features and as many up features."""
    halves = out.reshape(2, out.shape[0] // 2, out.shape[1])
    first = (jnp.arange(2, dtype=jnp.int32) == 0)[:, None, None]
    gate = jnp.sum(jnp.where(first, halves, 0.0), axis=0)
    return gate, jnp.sum(jnp.where(first, 0.0, halves), axis=0)
