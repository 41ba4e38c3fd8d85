"""KDA prefill in the chunkwise (WY) form, in Pallas kernels.

`kda_prefill_project` runs the short convolution; `kda_prefill_chunk` makes of every chunk at once,
independent of the state, what the walk needs; `kda_prefill_walk` takes the states from chunk to
chunk, in place, and makes every chunk's output; `kda_prefill_output` gates and norms it. A long
walk is cut into segments: `kda_prefill_leap` finds first what each does to any state, and
`kda_prefill_borders` the states between them. Operands of the products are in the compute dtype,
sums float32 (in bf16, those of decays and of the triangular inverse float16).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.kda_common import resolve_slots, store_window, window_before
from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_prefill_chunk_pallas import ChunkParts, chunk_kernel, project_kernel
from pallas_kernels.kda_prefill_walk_pallas import (
    Leaps,
    borders_kernel,
    leap_kernel,
    output_kernel,
    walk_kernel,
)
from pallas_kernels.kda_types import KdaCache, KdaPending, KdaRows, KdaWeights, most_rows

SHORT = 1024  # rows, up to which the walk is one segment
MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True)
class PrefillTiles:
    """Static sizes of the kernels."""

    chunk: int  # rows
    strip: int  # values of a program of the walk
    project_warps: int
    chunk_warps: int
    walk_warps: int
    walk_stages: int
    programs: int  # of the walk that fill the GPU: a long one is cut into segments for them
    leap_programs: int  # of the leap that run at once
    segment_chunks: int  # the least that are worth a segment
    border_strip: int  # values of a program that joins segments
    output_rows: int  # of a program
    output_warps: int
    maths: Maths


def prefill_tiles(
    value_dim: int, *, exact: bool, platform: str, length: int = 0, heads: int = 1
) -> PrefillTiles:
    """Choose the sizes for up to `length` rows a request, and `heads` of all requests together.

    Chunks of 32 rows share one reference for their decays (`BOUNDED_ROWS`); strips of 64 values
    fill the rows of NVIDIA's matrix instruction.
    """
    if exact:
        # float32 products run on the vector units, unrolled: small ones.
        return PrefillTiles(
            16, min(value_dim, 32), 4, 8, 4, 1, 64, 128, 2, 16, 16, 8, Maths(native=False)
        )
    strip = min(value_dim, 64)
    if platform == "cuda":
        # The fewer warps a chunk has, the less they wait for each other: two hold its tiles.
        native, walk_warps = Maths(native=True), 4
        if length <= SHORT and heads * (value_dim // 16) <= MULTIPROCESSORS:
            strip, walk_warps = min(value_dim, 16), 2  # else most multiprocessors would be idle
        return PrefillTiles(32, strip, 8, 2, walk_warps, 3, 264, 396, 24, 16, 64, 8, native)
    # As many registers as a wave of 64 needs; one chunk on its way fits the LDS of a gfx942, the
    # products between segments do not.
    return PrefillTiles(32, strip, 4, 4, 4, 2, 1, 1, 24, 64, 64, 8, Maths(native=False))


def _check(rows: KdaRows, cache: KdaCache) -> None:
    value_dim, key_dim = cache.state.shape[2:]
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size < 16 or size & (size - 1):
            raise NotImplementedError(
                f"kda_prefill's kernels take {name} widths that are a power of two and at least "
                f"16, not {size}: use impl='reference'"
            )
    if rows.qkv.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"kda_prefill's kernels take bfloat16 and float32 rows, not {rows.qkv.dtype}: "
            f"use impl='reference'"
        )


def _launches(
    rows: KdaRows,
    weights: KdaWeights,
    window: jax.Array,  # [B, 3, C]
    pending: KdaPending,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    replayed: jax.Array,  # i32[B]
    fresh: jax.Array,  # bool[B]
    lengths: jax.Array,  # i32[B]
    pool: jax.Array,  # f32[S, H, V, K]
    *,
    tiles: PrefillTiles,
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernels: (out [B, T, H*V], broken bool[B], pool)."""
    (batch, length, _), dtype = rows.qkv.shape, rows.qkv.dtype
    heads, value_dim, key_dim = pool.shape[1:]
    chunks = -(-length // tiles.chunk)
    lead = (batch, heads, chunks)
    shape: Any = jax.ShapeDtypeStruct
    projected_shape = shape((*lead, 3 * tiles.chunk, max(key_dim, value_dim)), dtype)
    projected = launch.launch(
        partial(project_kernel, widths=(key_dim, value_dim), maths=tiles.maths),
        rows, window, weights, lengths,
        name="kda_prefill_project",
        grid=(chunks, heads * 3, batch),
        out_shape=projected_shape,
        interpret=interpret,
        num_warps=tiles.project_warps,
    )  # fmt: skip
    chunk_operands = (rows, weights, lengths, projected)
    parts = launch.launch(
        partial(chunk_kernel, lower_bound=lower_bound, maths=tiles.maths, interpret=interpret),
        *chunk_operands,
        name="kda_prefill_chunk",
        grid=(chunks, heads, batch),
        out_shape=ChunkParts(
            rows=projected_shape,
            update=shape((*lead, value_dim, tiles.chunk), dtype),
            mix=shape((*lead, tiles.chunk, tiles.chunk), dtype),
            shrink=shape((*lead, key_dim), jnp.float32),
        ),
        interpret=interpret,
        num_warps=tiles.chunk_warps,
        aliases={len(jax.tree.leaves(chunk_operands)) - 1: 0},
    )
    known = (parts, pending, slots, starts, replayed, fresh, lengths)
    strips = value_dim // tiles.strip
    strip = min(tiles.strip, key_dim)  # of the leap: none holds rows of both kinds
    leaps_together = 1 + tiles.leap_programs // (batch * heads * ((value_dim + key_dim) // strip))
    together = min(tiles.programs // (batch * heads * strips), leaps_together)
    segments = max(1, min(together, chunks // tiles.segment_chunks))
    states = None
    if segments > 1:
        halves = 1 if dtype == jnp.float32 else 2
        leaps = launch.launch(
            partial(leap_kernel, strip=strip),
            *known,
            pool,
            name="kda_prefill_leap",
            grid=((value_dim + key_dim) // strip, (segments - 1) * heads, batch),
            out_shape=Leaps(
                ends=shape((batch, heads, segments, value_dim, key_dim), jnp.float32),
                matrices=shape((batch, heads, segments - 1, halves, key_dim, key_dim), dtype),
            ),
            interpret=interpret,
            num_warps=tiles.walk_warps,
            num_stages=tiles.walk_stages,
        )
        strip = min(tiles.border_strip, value_dim)
        states = launch.launch(
            partial(borders_kernel, strip=strip),
            leaps.ends,
            leaps.matrices,
            name="kda_prefill_borders",
            grid=(value_dim // strip, heads, batch),
            out_shape=shape(leaps.ends.shape, jnp.float32),
            interpret=interpret,
            num_warps=4,
            num_stages=2,
            aliases={0: 0},
        )
    operands = (*known, states, pool)
    outs, pool = launch.launch(
        partial(walk_kernel, strip=tiles.strip),
        *operands,
        name="kda_prefill_walk",
        grid=(strips, segments * heads, batch),
        out_shape=(
            shape((*lead, value_dim, tiles.chunk), dtype),
            shape(pool.shape, jnp.float32),
        ),
        interpret=interpret,
        num_warps=tiles.walk_warps,
        num_stages=tiles.walk_stages,
        aliases={len(jax.tree.leaves(operands)) - 1: 1},
    )
    programs = -(-length // tiles.output_rows)
    out, broken = launch.launch(
        partial(output_kernel, rows=tiles.output_rows, norm_eps=norm_eps, maths=tiles.maths),
        outs, rows.gate, weights.o_norm, lengths,
        name="kda_prefill_output",
        grid=(programs, heads, batch),
        out_shape=(
            shape(rows.gate.shape, dtype),
            shape((batch, heads, programs), jnp.bool_),
        ),
        interpret=interpret,
        num_warps=tiles.output_warps,
    )  # fmt: skip
    return out, jnp.any(broken, axis=(1, 2)), pool


def kda_prefill_pallas(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    fresh: jax.Array,  # bool[B]
    *,
    lengths: jax.Array,  # i32[B]
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
    tiles: PrefillTiles | None = None,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_prefill`."""
    _check(rows, cache)
    slots, live, health = resolve_slots(slots, cache.state.shape[0])
    lengths = jnp.where(live, jnp.clip(lengths, 0, rows.qkv.shape[1]), 0)
    replayed = jnp.clip(accepted, 0, most_rows(cache))
    replayed = jnp.where(live & ~fresh, replayed, 0)
    window = window_before(cache, slots, starts)

    def launches(platform: str) -> Callable[..., Any]:
        chosen = tiles or prefill_tiles(
            cache.state.shape[2],
            exact=rows.qkv.dtype == jnp.float32,
            platform=platform,
            length=rows.qkv.shape[1],
            heads=rows.qkv.shape[0] * cache.state.shape[1],
        )
        return partial(
            _launches,
            tiles=chosen,
            lower_bound=lower_bound,
            norm_eps=norm_eps,
            interpret=interpret,
        )

    out, broken, state = launch.by_platform(
        rows, weights, window, cache.pending, slots, starts, replayed, fresh, lengths, cache.state,
        cuda=launches("cuda"), portable=launches("portable"), interpret=interpret,
    )  # fmt: skip
    conv = store_window(cache, slots, starts, lengths, rows.qkv)
    cache = dataclasses.replace(cache, conv=conv, state=state)
    return out, cache, broken, health
