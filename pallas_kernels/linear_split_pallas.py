"""Linear layers of few features on Triton: programs share K, and a second launch adds.

The partial sums are added in the order of K, whoever was first. On an H200 the second launch costs
1.0 us; a last program that adds, told so by an atomic counter, costs 1.45.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.linear_tile_pallas import PORTABLE_STAGES, LinearTiles, accumulate

PARTS_NAME, SUM_NAME = "linear_parts", "linear_sum"
SUM_COLUMNS = 256  # of a row in one program of the second launch: 16 bytes a lane and load


def linear_split(
    x: jax.Array,  # [W, K]
    weight: jax.Array,  # [N, K]
    *,
    squares: jax.Array | None,  # f32[W, G, N]
    norm: jax.Array | None,
    eps: float,
    activation: Activation | None,
    add: jax.Array | None,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
    tiles: LinearTiles,
) -> jax.Array:
    """See `pallas_kernels.linear`; `tiles.split` divides the steps of K."""
    rows, features = x.shape[0], weight.shape[0]
    columns = features // (1 if activation is None else 2)
    scales = [each for each in (norm, squares) if each is not None]

    def products(*operands, narrow, stages):
        return launch.launch(
            functools.partial(
                _parts_kernel, tiles=tiles, narrow=narrow, eps=eps, has_norm=norm is not None
            ),
            *operands,
            name=PARTS_NAME,
            grid=(pl.cdiv(features, tiles.features), tiles.split),
            out_shape=jax.ShapeDtypeStruct((tiles.split, rows, features), jnp.float32),
            interpret=interpret,
            num_warps=tiles.warps,
            num_stages=stages,
        )

    parts = launch.by_platform(
        x,
        weight,
        *scales,
        cuda=functools.partial(products, narrow=8, stages=tiles.stages),
        portable=functools.partial(products, narrow=16, stages=min(tiles.stages, PORTABLE_STAGES)),
        interpret=interpret,
    )
    normed = [] if norm is None else [x]
    added = [] if add is None else [add]
    return launch.launch(
        functools.partial(
            _sum_kernel,
            eps=eps,
            activation=activation,
            has_norm=norm is not None,
            has_add=add is not None,
        ),
        parts,
        *normed,
        *added,
        name=SUM_NAME,
        grid=(rows, pl.cdiv(columns, SUM_COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        interpret=interpret,
        num_warps=1,
    )


def _parts_kernel(
    x_ref,  # [W, K]
    weight_ref,  # [N, K]
    *refs,  # norm [K] or squares f32[W, G, N] if given; out: parts f32[split, W, N]
    tiles: LinearTiles,
    narrow: int,  # the least side of the matrix unit
    eps: float,
    has_norm: bool,
):
    given, parts_ref = refs[0] if len(refs) == 2 else None, refs[-1]
    norm_ref, squares_ref = (given, None) if has_norm else (None, given)
    (rows, depth), features = x_ref.shape, weight_ref.shape[0]
    row = jnp.arange(max(narrow, pl.next_power_of_2(rows)), dtype=jnp.int32)
    feature = pl.program_id(0) * tiles.features + jnp.arange(tiles.features, dtype=jnp.int32)
    part = pl.program_id(1)
    steps = depth // tiles.depth // tiles.split
    # Features beyond the end repeat the last one; what they give is not stored.
    out, _ = accumulate(
        x_ref,
        weight_ref,
        row,
        jnp.minimum(feature, features - 1),
        steps=steps,
        depth=tiles.depth,
        first=part * steps,
        norm_ref=norm_ref,
        squares_ref=squares_ref,
        eps=eps,
    )
    mask = (feature < features)[:, None] & (row < rows)[None, :]
    at = (part, row[None, :], feature[:, None])
    place = parts_ref.at[tuple(jnp.broadcast_to(axis, out.shape) for axis in at)]
    launch.store(place, out, mask=mask)


def _sum_kernel(
    parts_ref,  # f32[split, W, N]
    *refs,  # x [W, K] if there is a norm, add [W, N'] if given; out [W, N']
    eps: float,
    activation: Activation | None,
    has_norm: bool,
    has_add: bool,
):
    out_ref = refs[-1]
    columns = out_ref.shape[1]
    row = pl.program_id(0)
    column = pl.program_id(1) * SUM_COLUMNS + jnp.arange(SUM_COLUMNS, dtype=jnp.int32)
    inside = column < columns

    def load(ref, *lead, first=0):
        return launch.load(ref.at[launch.mesh(*lead, first + column)], mask=inside, other=0.0)

    def total(first):
        parts = [
            load(parts_ref, jnp.int32(part), row, first=first) for part in range(parts_ref.shape[0])
        ]
        return functools.reduce(jnp.add, parts) * scale

    scale = _inverse_root(refs[0], row, eps) if has_norm else 1.0
    if activation is None:
        out = total(0)
    else:
        out = gated(activation, total(0), total(columns))
    if has_add:
        out += load(refs[int(has_norm)], row).astype(jnp.float32)
    launch.store(out_ref.at[launch.mesh(row, column)], out.astype(out_ref.dtype), mask=inside)


def _inverse_root(x_ref, row, eps):
    """One over the root mean square of a row."""
    depth = x_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(depth), dtype=jnp.int32)
    x = launch.load(x_ref.at[launch.mesh(row, at)], mask=at < depth, other=0.0)
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x) / depth + eps)
