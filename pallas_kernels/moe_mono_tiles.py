"""Sizes of moe_mono's items, and the places of its counters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.moe_mxfp4_pallas import MoeTiles, moe_tiles
from pallas_kernels.mxfp4 import WORD


@dataclasses.dataclass(frozen=True)
class MonoTiles:
    """Sizes of the items of one launch."""

    experts: MoeTiles
    rows: int  # rows of a step, padded to a side of the matrix unit
    features: int = 16  # of one item of a plain matrix
    splits: int = 8  # pieces of the hidden width
    router_splits: int = 8  # those of the router, whose items run first
    depth: int = 128  # columns of one tile of a plain matrix


@dataclasses.dataclass(frozen=True)
class Counters:
    """Places of the counters in the control words."""

    logits: int
    latent: int
    chosen: int
    shared: int
    hidden: int  # one for each pair
    columns: int  # one for each item of output columns
    tiles: tuple[int, int, int]  # of router, latent, shared up: one for each tile of features
    bad: int  # no counters: a word for each row, `bad_mark` of the last launch it was not finite in
    count: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shape letters of one launch: see pallas_kernels; S is the shared experts' inner width."""

    W: int
    D: int
    Z: int
    E: int
    I: int
    J: int
    S: int


def mono_tiles(sizes: Sizes, *, exact: bool) -> MonoTiles:
    """Choose the items' sizes; `exact`: float32 products. Measured in benchmarks/RESULTS.md."""
    pairs = sizes.W * sizes.J
    experts = moe_tiles(pairs, sizes.Z, exact=exact)
    if not exact:
        experts = dataclasses.replace(experts, prepare=True)  # whoever makes the latents prepares
    return MonoTiles(experts, rows=8 if sizes.W <= 8 else 16)


def feature_tile(tiles: MonoTiles, features: int) -> int:
    return min(tiles.features, features & -features)


def column_tile(tiles: MonoTiles, depth: int) -> int:
    return min(tiles.depth, depth & -depth)


def split_counts(tiles: MonoTiles, depth: int) -> tuple[int, int, int]:
    """Pieces of the hidden width for the router, the latent and the shared experts."""
    count = depth // column_tile(tiles, depth)
    router, plain = (
        max(n for n in range(1, most + 1) if count % n == 0)
        for most in (tiles.router_splits, tiles.splits)
    )
    return router, plain, plain


def counters(sizes: Sizes, tiles: MonoTiles) -> Counters:
    """Lay out the control words."""
    place, starts = 4, []
    pairs = sizes.W * sizes.J
    features = [n // feature_tile(tiles, n) for n in (sizes.E, sizes.Z, 2 * sizes.S)]
    for count in (pairs, sizes.Z // tiles.experts.columns, *features, sizes.W):
        starts.append(place)
        place += count
    hidden, columns, router, latent, shared, bad = starts
    return Counters(0, 1, 2, 3, hidden, columns, (router, latent, shared), bad, place)


def item_count(sizes: Sizes, tiles: MonoTiles) -> int:
    """Items of all stages of a launch."""
    plain = sum(
        features // feature_tile(tiles, features) * splits
        for features, splits in zip(
            (sizes.E, sizes.Z, 2 * sizes.S), split_counts(tiles, sizes.D), strict=True
        )
    )
    experts = sizes.I // tiles.experts.inner + sizes.Z // tiles.experts.columns
    return plain + sizes.D // feature_tile(tiles, sizes.D) + sizes.W * (1 + sizes.J * experts)


def sizes_of(x: jax.Array, weights: Any, top_k: int) -> Sizes:
    bank = weights.bank
    rows, hidden = x.shape
    count, latent, words = bank.w2.shape
    shared = weights.shared_down.shape[1]
    return Sizes(rows, hidden, latent, count, words * WORD, top_k, shared)


def bad_mark(epoch: jax.Array) -> jax.Array:
    """What tells a row that was not finite in the launch that ended with `epoch`; never zero."""
    return 2 * epoch + 1
