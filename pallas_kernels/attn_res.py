"""Attention residuals (AttnRes): a softmax mix of the block snapshots and the running sum.

A vector's score is its product with query_norm * query_proj, over its root mean square; what is
mixed is the vectors as they are. Source: Kimi-K3's released model.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.attn_res_pallas import attn_res_pallas
from pallas_kernels.attn_res_reference import (
    attn_res_mix,
    attn_res_reference,
    attn_res_weights,
)
from pallas_kernels.attn_res_rows_pallas import attn_res_rows_pallas
from pallas_kernels.impl import MOST_ROWS, Impl, require_impl

__all__ = ["attn_res", "attn_res_mix", "attn_res_weights"]


def attn_res(
    blocks: jax.Array,  # [M, W, D]
    count: jax.Array,  # i32[]
    part: jax.Array,  # [W, D]
    query_norm: jax.Array,  # [D]
    query_proj: jax.Array,  # [D]
    norm: jax.Array,  # [D]
    *,
    delta: jax.Array | None = None,  # [W, D], of any floating dtype
    eps: float,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """Add `delta` to the partial sum, mix it with blocks[:count], and normalize the mix.

    Returns (normed [W, D], part + delta [W, D]), both in part.dtype. count 0 mixes nothing. Blocks
    at or beyond `count` may hold anything, NaN included: they are not read. Up to 64 rows the
    kernels spread a row over many multiprocessors; with more, one program has a row. Raises
    ValueError on misfit shapes.
    """
    require_impl("attn_res", impl)
    if blocks.ndim != 3 or blocks.shape[1:] != part.shape:
        raise ValueError(
            f"attn_res takes blocks[M,W,D], part[W,D]; got {blocks.shape}, {part.shape}"
        )
    run = attn_res_reference
    if impl != "reference":
        kernel = attn_res_pallas if part.shape[0] <= MOST_ROWS else attn_res_rows_pallas
        run = functools.partial(kernel, interpret=impl == "interpret")
    return run(blocks, count, part, query_norm, query_proj, norm, delta=delta, eps=eps)
