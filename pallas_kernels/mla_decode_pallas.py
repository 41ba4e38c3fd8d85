"""Split-K latent attention as two Pallas kernels: programs attend to ranges of the context, then a
small launch weighs the ranges' results by their softmax totals, always in the same order.

With one range a request (long prompts, large batches) the first launch writes the result itself.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.health import BIT_PAGE
from pallas_kernels.mla_attend_pallas import (
    BIT_NONFINITE,
    AttendTiles,
    Shapes,
    attend,
    attend_tiles,
    bit,
    count_true,
    load,
    per_platform,
    place_of,
    power_of_two,
    shapes_of,
    store_vectors,
    store_zeros,
)

# Compute units of an H200, and of an MI355X; the tiles leave room for one program on each.
# Interpretation runs the programs one after another.
UNITS = {"cuda": 132, "rocm": 256, "interpret": 8}
COMBINE_ELEMENTS = 8192  # partial results of a program of the combine launch: 64 a thread


def choose_splits(shapes: Shapes, tiles: AttendTiles, platform: str) -> int:
    """How many ranges the context is cut into: enough programs to fill the GPU once."""
    programs = shapes.batch * pl.cdiv(shapes.vectors, tiles.queries)
    return max(1, min(UNITS[platform] // programs, pl.cdiv(shapes.capacity, tiles.positions)))


def _attend_kernel(
    q_ref,  # [B, T*H, L+R]
    pages_ref,  # [P, page, L+R]
    table_ref,  # i32[B, max_pages]
    base_ref,  # i32[B] position of row 0
    valid_ref,  # i32[B] rows
    out_ref,  # [B, splits, T*H, L], or [B, T*H, L] if there is one range
    lse_ref,  # f32[B, splits, T*H] log2 of the softmax total, -inf for an empty range
    word_ref,  # i32[B, splits, tiles]
    *,
    shapes: Shapes,
    tiles: AttendTiles,
    splits: int,
    scale: float,
):
    tile, split, request = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = pl.num_programs(0) - 1 - tile  # the last rows of a prompt see the most: they go first
    place = place_of(base_ref, valid_ref, shapes, tiles, splits, (tile, split, request))
    here = place.vector < shapes.vectors
    beyond = base_ref[request] + valid_ref[request] > shapes.capacity
    beyond = bit(beyond & (valid_ref[request] > 0), BIT_PAGE)

    lead = (request,) if splits == 1 else (request, split)

    def leave():
        if splits == 1:
            store_zeros(out_ref, lead, place, shapes, tiles)
        launch.store(
            lse_ref.at[request, split, place.vector],
            jnp.full((tiles.queries,), -jnp.inf, jnp.float32),
            mask=here,
        )
        word_ref[request, split, tile] = beyond

    def work():
        out, top, total, word = attend(q_ref, pages_ref, table_ref, place, shapes, tiles, scale)
        store_vectors(out_ref, lead, place, out, shapes, tiles)
        lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log2(total))
        launch.store(lse_ref.at[request, split, place.vector], lse, mask=here)
        word_ref[request, split, tile] = word | beyond

    lax.cond(place.begin < place.stop, work, leave)


def _combine_kernel(
    part_ref,  # [B, splits, T*H, L]
    lse_ref,  # f32[B, splits, T*H]
    word_ref,  # i32[B, splits * tiles]
    valid_ref,  # i32[B]
    out_ref,  # [B, T*H, L]
    flag_ref,  # bool[B]
    health_ref,  # u32[1]
    *,
    shapes: Shapes,
    columns: int,
):
    vector, request, cut = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    splits, words = lse_ref.shape[1], word_ref.shape[1]

    def combine():
        lane = cut * columns + lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        valid = lane < shapes.latent
        split = jnp.arange(power_of_two(splits), dtype=jnp.int32)
        here = split < splits
        # An empty range has written no result. The loads do not wait for the totals that tell.
        part = load(part_ref, (request, split[:, None], vector, lane), here[:, None] & valid)
        lse = launch.load(
            lse_ref.at[request, split, vector], mask=here, other=jnp.float32(-jnp.inf)
        )
        part = jnp.where((lse != -jnp.inf)[:, None], part.astype(jnp.float32), 0.0)
        top = jnp.max(lse)
        weight = jnp.exp2(lse - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(weight)
        out = jnp.sum(part * weight[:, None], axis=0)[None, :]
        out = out * (1.0 / jnp.where(total == 0.0, 1.0, total))
        launch.store(out_ref.at[request, vector, lane], out.astype(out_ref.dtype), mask=valid)

    def report():
        column = jnp.arange(power_of_two(words), dtype=jnp.int32)
        word = load(word_ref, (request, column), column < words)
        broken = count_true(word & BIT_NONFINITE != 0) > 0
        flag_ref[request] = broken & (valid_ref[request] > 0)

    def report_all():
        size = shapes.batch * words
        flat = jnp.arange(power_of_two(size), dtype=jnp.int32)
        width = jnp.int32(words)
        word = load(word_ref, (lax.div(flat, width), lax.rem(flat, width)), flat < size)
        wrong = count_true(word & BIT_PAGE != 0) > 0
        health_ref[0] = bit(wrong, BIT_PAGE).astype(jnp.uint32)

    lax.cond(vector < shapes.vectors, combine, lambda: None)
    extra = vector == shapes.vectors
    lax.cond(extra & (cut == 0), report, lambda: None)
    lax.cond(extra & (cut == pl.num_programs(2) - 1) & (request == 0), report_all, lambda: None)


def attend_pages(
    q: jax.Array,  # [B, T, H, L+R]
    pages: jax.Array,  # [P, page, L+R]
    page_table: jax.Array,  # i32[B, max_pages]
    base: jax.Array,  # i32[B] position of row 0
    valid: jax.Array,  # i32[B] rows that count
    *,
    latent: int,
    scale: float,
    name: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from row t of request b to positions up to base[b] + t, for t < valid[b]."""
    shapes = shapes_of(q, pages, page_table, latent)
    exact = q.dtype == jnp.float32

    def make(platform):
        tiles = attend_tiles(shapes.vectors, latent, exact=exact, platform=platform)
        splits = choose_splits(shapes, tiles, platform)
        return partial(
            launch_tiles, shapes=shapes, tiles=tiles, splits=splits, scale=scale, name=name,
            interpret=interpret,
        )  # fmt: skip

    args = (q, pages, page_table, base, valid)
    return make("interpret")(*args) if interpret else per_platform(make, *args)


def launch_tiles(
    q, pages, page_table, base, valid, *, shapes, tiles, splits, scale, name, interpret
):
    """The launches of one choice of tiles; see `attend_pages`."""
    batch, vectors, count = shapes.batch, shapes.vectors, pl.cdiv(shapes.vectors, tiles.queries)
    lead = (batch,) if splits == 1 else (batch, splits)
    part, lse, words = launch.launch(
        partial(_attend_kernel, shapes=shapes, tiles=tiles, splits=splits, scale=scale),
        q.reshape(batch, vectors, -1), pages, page_table, base, valid,
        name=name,
        grid=(count, splits, batch),
        out_shape=(
            jax.ShapeDtypeStruct((*lead, vectors, shapes.latent), q.dtype),
            jax.ShapeDtypeStruct((batch, splits, vectors), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, count), jnp.int32),
        ),
        interpret=interpret,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    words = words.reshape(batch, splits * count)
    if splits == 1:
        flags = jnp.any(words & BIT_NONFINITE != 0, axis=1) & (valid > 0)
        health = jnp.max(words & BIT_PAGE).astype(jnp.uint32)
        return part.reshape(*q.shape[:3], shapes.latent), flags, health
    padded = power_of_two(shapes.latent)
    columns = min(padded, max(32, COMBINE_ELEMENTS // power_of_two(splits)))
    out, flags, health = launch.launch(
        partial(_combine_kernel, shapes=shapes, columns=columns),
        part, lse, words, valid,
        name="mla_combine",
        grid=(vectors + 1, batch, padded // columns),  # the last one reports
        out_shape=(
            jax.ShapeDtypeStruct((batch, vectors, shapes.latent), q.dtype),
            jax.ShapeDtypeStruct((batch,), jnp.bool_),
            jax.ShapeDtypeStruct((1,), jnp.uint32),
        ),
        interpret=interpret,
        num_warps=4,
    )  # fmt: skip
    return out.reshape(*q.shape[:3], shapes.latent), flags, health[0]


def mla_decode_pallas(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    latent: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla_decode`."""
    rows = q.shape[1]
    valid = jnp.where(lengths > 0, rows, 0)
    return attend_pages(
        q, pages, page_table, lengths - rows, valid,
        latent=latent, scale=scale, name="mla_decode", interpret=interpret,
    )  # fmt: skip
