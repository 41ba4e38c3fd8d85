"""Attention residuals on Triton: one program a row, the row's blocks read once from memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch

NAME = "attn_res"
VECTOR_BYTES = 16  # what a lane reads at once


@dataclasses.dataclass(frozen=True)
class AttnResTiles:
    """Columns worked on at once, and warps of a program."""

    columns: int
    warps: int
    keep: bool  # hold the blocks in registers for the second pass, instead of reading the cache


def attn_res_tiles(depth: int, itemsize: int, lanes: int = 32) -> AttnResTiles:
    """Choose tiles: a tile's row is one vector a lane, so that blocks never cross threads."""
    warps = 16
    columns = warps * lanes * VECTOR_BYTES // itemsize
    return AttnResTiles(min(columns, pl.next_power_of_2(depth)), warps, False)


def attn_res_pallas(
    blocks: jax.Array,  # [M, W, D]
    count: jax.Array,  # i32[]
    part: jax.Array,  # [W, D]
    query_norm: jax.Array,  # [D]
    query_proj: jax.Array,  # [D]
    norm: jax.Array,  # [D]
    *,
    delta: jax.Array | None,
    eps: float,
    interpret: bool,
    tiles: AttnResTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attn_res`."""
    rows, depth = part.shape
    tiles = tiles or attn_res_tiles(depth, part.dtype.itemsize)
    operands = [count.reshape(1), blocks, part, query_norm, query_proj, norm]
    operands += [] if delta is None else [delta]

    def run(*operands, warps):
        return launch.launch(
            functools.partial(_kernel, eps=eps, tiles=tiles, has_delta=delta is not None),
            *operands,
            name=NAME,
            grid=(rows,),
            out_shape=(jax.ShapeDtypeStruct(part.shape, part.dtype),) * 2,
            interpret=interpret,
            num_warps=warps,
        )

    return launch.by_platform(
        *operands,
        cuda=functools.partial(run, warps=tiles.warps),
        portable=functools.partial(run, warps=max(1, tiles.warps // 2)),  # waves of 64 lanes
        interpret=interpret,
    )


def _kernel(
    count_ref,  # i32[1]
    blocks_ref,  # [M, W, D]
    part_ref,  # [W, D]
    query_norm_ref,  # [D]
    query_proj_ref,  # [D]
    norm_ref,  # [D]
    *refs,  # delta [W, D] if given; out: normed [W, D], part [W, D]
    eps: float,
    tiles: AttnResTiles,
    has_delta: bool,
):
    normed_ref, new_part_ref = refs[-2:]
    block_count, _, depth = blocks_ref.shape
    row, count = pl.program_id(0), count_ref[0]
    block = jnp.arange(pl.next_power_of_2(block_count), dtype=jnp.int32)
    live = block < jnp.minimum(count, block_count)
    starts = range(0, depth, tiles.columns)

    def column(start):
        at = start + jnp.arange(tiles.columns, dtype=jnp.int32)
        return at, at < depth

    def vector(ref, start, *lead):
        at, inside = column(start)
        loaded = launch.load(ref.at[launch.mesh(*lead, at)], mask=inside, other=0.0)
        return loaded.astype(jnp.float32)

    def load_blocks(start, policy=None):
        at, inside = column(start)
        mask = live[:, None] & inside[None, :]
        place = blocks_ref.at[launch.mesh(block, row, at)]
        return launch.load(place, mask=mask, other=0.0, eviction_policy=policy)

    # Every load starts before the first store, which the compiler would not let a load pass.
    parts, queries, norms = [], [], []
    for start in starts:
        part = vector(part_ref, start, row)
        if has_delta:
            part += vector(refs[0], start, row)
        parts.append(part.astype(part_ref.dtype))
        queries.append((vector(query_norm_ref, start), vector(query_proj_ref, start)))
        norms.append(vector(norm_ref, start).astype(norm_ref.dtype))
    squares = products = jnp.zeros((block.size, tiles.columns), jnp.float32)
    part_squares = part_products = jnp.zeros(tiles.columns, jnp.float32)
    kept = []
    for start, part, (query_norm, query_proj) in zip(starts, parts, queries, strict=True):
        values = load_blocks(start)
        kept.append(values)
        query = query_norm * query_proj
        wide, part = values.astype(jnp.float32), part.astype(jnp.float32)
        squares += wide * wide
        products += wide * query[None, :]
        part_squares += part * part
        part_products += part * query
    scores = jnp.sum(products, axis=1) * lax.rsqrt(jnp.sum(squares, axis=1) / depth + eps)
    part_score = jnp.sum(part_products) * lax.rsqrt(jnp.sum(part_squares) / depth + eps)
    top = jnp.maximum(jnp.max(jnp.where(live, scores, -jnp.inf)), part_score)
    weights = jnp.where(live, jnp.exp(scores - top), 0.0)
    part_weight = jnp.exp(part_score - top)
    total = jnp.sum(weights) + part_weight
    weights, part_weight = weights / total, part_weight / total

    mixes, mix_squares = [], jnp.zeros(tiles.columns, jnp.float32)
    for start, values, part in zip(starts, kept, parts, strict=True):
        # Named another way, or the compiler takes it for the first load and runs out of registers.
        values = values if tiles.keep else load_blocks(start, policy="evict_first")
        mix = jnp.sum(values.astype(jnp.float32) * weights[:, None], axis=0)
        mix += part.astype(jnp.float32) * part_weight
        mix_squares += mix * mix
        mixes.append(mix)
    root = lax.rsqrt(jnp.sum(mix_squares) / depth + eps)
    for start, mix, part, norm in zip(starts, mixes, parts, norms, strict=True):
        at, inside = column(start)
        launch.store(new_part_ref.at[launch.mesh(row, at)], part, mask=inside)
        normed = (mix * root * norm.astype(jnp.float32)).astype(normed_ref.dtype)
        launch.store(normed_ref.at[launch.mesh(row, at)], normed, mask=inside)
