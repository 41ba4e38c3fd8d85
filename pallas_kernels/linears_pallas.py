"""Several skinny linear layers of the same rows on Triton, in one launch.

Each weight has a run of programs; few features alone would leave multiprocessors idle, and each
launch would wait for the slowest program of the one before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate as running_sum

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.linear_tile_pallas import PORTABLE_STAGES, accumulate, gate_and_up

NAME = "linears"


@dataclasses.dataclass(frozen=True)
class LinearsTiles:
    """Tile sizes; weights are the dot's left operand, rows the narrow right one."""

    features: int  # rows of a weight in one program
    depth: int  # columns of K in one step of the loop
    warps: int
    stages: int  # steps in flight


def linears_tiles(depth: int, *, exact: bool) -> LinearsTiles:
    """Choose tiles for x[rows, depth]; `exact`: float32 products.

    Narrow tiles share the work evenly, whatever the number of features: see benchmarks/RESULTS.md.
    """
    step = depth & -depth  # the largest power of two that divides K: no masks inside the loop
    if exact:
        return LinearsTiles(16, min(step, 64), 4, 1)
    return LinearsTiles(16, min(step, 256), 2, 4)


def linears_pallas(
    x: jax.Array,  # [W, K]
    weights: Sequence[jax.Array],  # [N, K] each
    activations: Sequence[Activation | None],
    out_shapes: Sequence[Sequence[jax.ShapeDtypeStruct]],  # of each weight, side by side [W, n]
    *,
    interpret: bool,
    tiles: LinearsTiles | None = None,
) -> list[jax.Array]:
    """See `pallas_kernels.linears`; W at most MOST_ROWS."""
    exact = jnp.float32 in (x.dtype, *(weight.dtype for weight in weights))
    tiles = tiles or linears_tiles(x.shape[1], exact=exact)
    counts = [pl.cdiv(weight.shape[0], tiles.features) for weight in weights]

    def run(*operands, narrow, stages):
        return launch.launch(
            functools.partial(
                _kernel,
                tiles=tiles,
                narrow=narrow,
                activations=tuple(activations),
                ends=tuple(running_sum(counts)),
                outputs=tuple(len(shapes) for shapes in out_shapes),
            ),
            *operands,
            name=NAME,
            grid=(sum(counts),),
            out_shape=[shape for shapes in out_shapes for shape in shapes],
            interpret=interpret,
            num_warps=tiles.warps,
            num_stages=stages,
        )

    return launch.by_platform(
        x,
        *weights,
        cuda=functools.partial(run, narrow=8, stages=tiles.stages),
        portable=functools.partial(run, narrow=16, stages=min(tiles.stages, PORTABLE_STAGES)),
        interpret=interpret,
    )


def _kernel(
    x_ref,  # [W, K]
    *refs,  # weights [N, K]; out: those of each weight [W, n]
    tiles: LinearsTiles,
    narrow: int,  # the least side of the matrix unit
    activations: tuple[Activation | None, ...],
    ends: tuple[int, ...],  # the program after each weight's last one
    outputs: tuple[int, ...],  # of each weight
):
    program = pl.program_id(0)
    weight_refs, out_refs = refs[: len(ends)], refs[len(ends) :]
    start, first = 0, 0
    for weight_ref, activation, end, count in zip(
        weight_refs, activations, ends, outputs, strict=True
    ):
        body = functools.partial(
            feature_tile,
            x_ref,
            weight_ref,
            out_refs[first : first + count],
            program - start,
            tiles=tiles,
            narrow=narrow,
            activation=activation,
        )
        pl.when((program >= start) & (program < end))(body)
        start, first = end, first + count


def feature_tile(x_ref, weight_ref, out_refs, index, *, tiles, narrow, activation):
    """One tile of a weight's features for all rows, stored where each feature belongs."""
    rows, depth = x_ref.shape
    columns = sum(out_ref.shape[1] for out_ref in out_refs)
    # Features beyond the end repeat the last one; what they give is not stored.
    row = jnp.arange(max(narrow, pl.next_power_of_2(rows)), dtype=jnp.int32)
    width = tiles.features // (1 if activation is None else 2)
    column = index * width + jnp.arange(width, dtype=jnp.int32)
    feature = jnp.minimum(column, columns - 1)
    if activation is not None:  # the gate's rows, then the same rows of up
        place = jnp.arange(tiles.features, dtype=jnp.int32)
        feature = jnp.minimum(index * width + place % width, columns - 1)
        feature += place // width * columns
    steps = depth // tiles.depth
    out, _ = accumulate(x_ref, weight_ref, row, feature, steps=steps, depth=tiles.depth)
    if activation is not None:
        out = gated(activation, *gate_and_up(out))
    first = 0
    for out_ref in out_refs:
        here = column - first
        mask = ((here >= 0) & (here < out_ref.shape[1]))[:, None] & (row < rows)[None, :]
        at = tuple(jnp.broadcast_to(axis, out.shape) for axis in (row[None, :], here[:, None]))
        launch.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)
        first += out_ref.shape[1]
