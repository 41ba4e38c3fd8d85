"""The router's choice beside a skinny linear layer, in one launch on Triton.

The choice is a chain of reductions in as many programs as there are rows; meanwhile the other
multiprocessors stream the weight.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.linear_tile_pallas import PORTABLE_STAGES
from pallas_kernels.linears_pallas import LinearsTiles, feature_tile
from pallas_kernels.route_pallas import top_k_row

NAME = "choose_beside"


def beside_tiles(depth: int, *, exact: bool) -> LinearsTiles:
    """Choose tiles for the linear layer's x[rows, depth]; `exact`: float32 products."""
    step = depth & -depth  # the largest power of two that divides K: no masks inside the loop
    if exact:
        return LinearsTiles(16, min(step, 64), 4, 1)
    return LinearsTiles(64, min(step, 256), 4, 3)


def choose_beside_pallas(
    logits: jax.Array,  # f32[W, E]
    bias: jax.Array,  # f32[E]
    x: jax.Array,  # [W, K]
    weight: jax.Array,  # [N, K]
    rows: jax.Array,  # i32[B]
    *,
    interpret: bool,
    tiles: LinearsTiles | None = None,
    **choice,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.choose_beside`."""
    count, shape = logits.shape[0], (logits.shape[0], choice["top_k"])
    exact = jnp.float32 in (x.dtype, weight.dtype)
    tiles = tiles or beside_tiles(x.shape[1], exact=exact)

    def run(*operands, narrow, stages):
        return launch.launch(
            functools.partial(_kernel, tiles=tiles, narrow=narrow, choice=choice),
            *operands,
            name=NAME,
            grid=(count + pl.cdiv(weight.shape[0], tiles.features),),
            out_shape=(
                jax.ShapeDtypeStruct(shape, jnp.int32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct((count, weight.shape[0]), jnp.float32),
            ),
            interpret=interpret,
            num_warps=tiles.warps,
            num_stages=stages,
        )

    return launch.by_platform(
        logits,
        bias,
        x,
        weight,
        rows,
        cuda=functools.partial(run, narrow=8, stages=tiles.stages),
        portable=functools.partial(run, narrow=16, stages=min(tiles.stages, PORTABLE_STAGES)),
        interpret=interpret,
    )


def _kernel(
    logits_ref,  # f32[W, E]
    bias_ref,  # f32[E]
    x_ref,  # [W, K]
    weight_ref,  # [N, K]
    rows_ref,  # i32[B]
    experts_ref,  # out i32[W, J]
    weights_ref,  # out f32[W, J]
    out_ref,  # out f32[W, N]
    *,
    tiles: LinearsTiles,
    narrow: int,
    choice: dict,
):
    program, count = pl.program_id(0), logits_ref.shape[0]
    each = count // rows_ref.shape[0]

    @pl.when(program < count)
    def _():
        real = program % each < rows_ref[program // each]
        results = (experts_ref, weights_ref)
        options = {"real": real, "warps": tiles.warps, **choice}
        top_k_row(logits_ref, bias_ref, *results, program, **options)

    @pl.when(program >= count)
    def _():
        options = {"tiles": tiles, "narrow": narrow, "activation": None}
        feature_tile(x_ref, weight_ref, (out_ref,), program - count, **options)
