"""The (row, choice) pairs of a batch sorted by expert and cut into tiles of one expert each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.health import BIT_EXPERT


class Groups(NamedTuple):
    """Tiles of pairs; a pair is row * J + choice. Tiles from `used` on are empty, of expert E."""

    pairs: jax.Array  # i32[M, R]; W * J in unused places, which are a tile's last
    expert: jax.Array  # i32[M] of each tile
    used: jax.Array  # i32[]


def group_pairs(experts: jax.Array, count: int, tile: int) -> Groups:
    """Cut the pairs of each of `count` experts into tiles of `tile`; ids outside are skipped.

    experts: i32[W, J].
    """
    ids = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    loads = jnp.zeros(count + 1, jnp.int32).at[ids].add(1)[:count]
    ends = jnp.cumsum(loads)
    tiles = (loads + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles)
    most = ids.size // tile + min(count, ids.size)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
    known = jnp.minimum(expert, count - 1)
    first = ends[known] - loads[known] + (index - tile_ends[known] + tiles[known]) * tile
    at = first[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]
    live = at < ends[known][:, None]  # nowhere in tiles from `used` on, which lie behind the last
    return Groups(jnp.where(live, order[jnp.where(live, at, 0)], ids.size), expert, tile_ends[-1])


def experts_health(experts: jax.Array, count: int) -> jax.Array:
    """u32[]: BIT_EXPERT if an id of i32[W, J] is neither one of `count` experts nor -1."""
    bad = jnp.any((experts < -1) | (experts >= count))
    return jnp.where(bad, jnp.uint32(BIT_EXPERT), jnp.uint32(0))
