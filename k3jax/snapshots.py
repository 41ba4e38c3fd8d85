"""Snapshots of what the recurrent layers know of a request, in a pool on the device.

A snapshot is taken from a slot at some position and put into another slot, whose request goes on
from there as if it had read those tokens itself. The latents need no copy: requests share the pages
of a prefix. Only a page that the prefix fills in part is copied, when a request goes on from it,
since its first owner may write to the rest of it, and so will the new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from k3jax.cache import (
    Cache,
    CacheSizes,
    Slots,
    cache_specs,
    put_layers,
    record,
    take_layers,
)
from k3jax.config import K3Config
from k3jax.parallel import REPLICATED, shardings, spec, spmd
from k3jax.prefix import Entry
from k3jax.sampling import observe
from k3jax.speculative import Drafter
from pallas_kernels import BIT_PLAN, KdaSnapshot

NOTHING = Entry(b"", 0, (), "", 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Snapshots:
    """A pool; every leaf has a leading N, and entry n of all leaves is one snapshot."""

    layers: tuple[KdaSnapshot, ...]  # of the KDA layers, in order
    draft: Any = None  # of what the drafter keeps


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resume:
    """How a slot goes on from a snapshot; numpy int32 on the host."""

    slot: Any  # [] admitted, with nothing read
    entry: Any  # [] of the pool
    position: Any  # [] tokens that the snapshot knows
    tokens: Any  # [max_pages * page] they, then anything
    pages: Any  # [max_pages] theirs, then 0
    source: Any  # [] the page that is copied, 0 if none is
    target: Any  # [] the one of `pages` that it is copied to


def resume_from(entry: Entry, slot: int, pages: list[int], sizes: CacheSizes) -> Resume:
    """How `slot`, whose request has these pages, goes on from an entry.

    They begin with the pages that the entry fills.
    """
    room, count = sizes.max_pages, -(-entry.tokens // sizes.page_size)
    tokens, table = np.zeros(room * sizes.page_size, np.int32), np.zeros(room, np.int32)
    tokens[: entry.tokens] = np.frombuffer(entry.key, np.int32)
    table[:count] = pages[:count]
    partly = entry.tokens % sizes.page_size > 0
    copied = (entry.pages[-1], table[count - 1]) if partly else (0, 0)
    return Resume(
        slot=np.int32(slot),
        entry=np.int32(entry.number),
        position=np.int32(entry.tokens),
        tokens=tokens,
        pages=table,
        source=np.int32(copied[0]),
        target=np.int32(copied[1]),
    )


class SnapshotPool:
    """Room for snapshots on the mesh, and the two compiled copies between it and a cache."""

    def __init__(
        self,
        config: K3Config,
        sizes: CacheSizes,
        mesh: Mesh,
        like: tuple[Cache, jax.Array],
        drafter: Drafter | None,
    ) -> None:
        """Allocates what `sizes.prefix` says; `like` is a cache of `sizes` and a health word."""
        cache, health = like
        shapes = snapshot_shapes(cache, drafter, sizes.prefix.snapshots)
        specs, cached = snapshot_specs(shapes), cache_specs(config, cache.draft)
        make = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=shardings(mesh, specs),
        )
        self._snapshots = make()
        saves = spmd(
            partial(save, drafter=drafter),
            mesh,
            in_specs=(cached, specs, REPLICATED, REPLICATED),
            out_specs=(specs, REPLICATED),
        )
        resumes = spmd(
            partial(resume, drafter=drafter),
            mesh,
            in_specs=(cached, specs, REPLICATED),
            out_specs=cached,
        )
        order = np.zeros(3, np.int32)
        # Told where results lie, JAX gives each donated array its own; XLA goes by size alone.
        kept = shardings(mesh, (specs, REPLICATED))
        self._save: Compiled = (
            jax.jit(saves, donate_argnums=(1, 2), out_shardings=kept)
            .lower(cache, self._snapshots, health, order)
            .compile()
        )
        self._resume: Compiled = (
            jax.jit(resumes, donate_argnums=0, out_shardings=shardings(mesh, cached))
            .lower(cache, self._snapshots, resume_from(NOTHING, 1, [], sizes))
            .compile()
        )

    def save(self, cache: Cache, health: jax.Array, order: np.ndarray) -> jax.Array:
        """Dispatch `save`; the health word is donated, and its successor returned."""
        self._snapshots, health = self._save(cache, self._snapshots, health, order)
        return health

    def resume(self, cache: Cache, order: Resume) -> Cache:
        """Dispatch `resume`; the cache is donated, and its successor returned."""
        return self._resume(cache, self._snapshots, order)


def snapshot_shapes(cache: Cache, drafter: Drafter | None, entries: int) -> Snapshots:
    """Shapes and dtypes of a pool beside `cache`, whose arrays, or shapes, are whole."""

    def taken(cache: Cache) -> Snapshots:
        one = jnp.zeros(1, jnp.int32)
        layers, _ = take_layers(cache.layers, one, one, one, one)
        return Snapshots(layers, drafter.take(cache.draft, one, one)[0] if drafter else None)

    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((entries, *leaf.shape[1:]), leaf.dtype),
        jax.eval_shape(taken, cache),
    )


def snapshot_specs(shapes: Snapshots) -> Snapshots:
    """The PartitionSpec of each leaf: split by heads, the drafter's whole on every rank."""
    window: Any = spec(None, None, "heads")
    state: Any = spec(None, "heads")
    layers = tuple(KdaSnapshot(window, state) for _ in shapes.layers)
    return Snapshots(layers, jax.tree.map(lambda leaf: REPLICATED, shapes.draft))


def snapshot_bytes(cache: Cache, drafter: Drafter | None, tp: int) -> int:
    """Bytes that one snapshot takes on each rank; `cache` as in `snapshot_shapes`."""
    shapes = snapshot_shapes(cache, drafter, 1)

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    return size(shapes.layers) // tp + size(shapes.draft)


def save(
    cache: Cache,
    snapshots: Snapshots,
    health: jax.Array,
    order: jax.Array,
    *,
    drafter: Drafter | None,
) -> tuple[Snapshots, jax.Array]:
    """Take a snapshot: order i32[3] is (slot, position, entry of the pool).

    The position must lie among the slot's pending rows, or health gets BIT_PLAN.
    """
    slots, position, entry = order[:1], order[1:2], order[2]
    length, accepted = cache.slots.length[slots], cache.slots.accepted[slots]
    layers, fine = take_layers(cache.layers, slots, position, length, accepted)
    draft = None
    if drafter is not None:
        draft, knows = drafter.take(cache.draft, slots, position)
        fine &= knows
    taken = Snapshots(layers, draft)
    pool = jax.tree.map(lambda leaf, new: leaf.at[entry].set(new[0]), snapshots, taken)
    return pool, health | jnp.where(fine, jnp.uint32(0), jnp.uint32(BIT_PLAN))


def resume(cache: Cache, snapshots: Snapshots, order: Resume, *, drafter: Drafter | None) -> Cache:
    """The cache with a slot that goes on from a snapshot: see `Resume`."""
    slots, position = order.slot[None], order.position[None]
    taken = jax.tree.map(lambda leaf: leaf[order.entry][None], snapshots)
    copied = (order.source, order.target)
    draft = cache.draft
    if drafter is not None:
        draft = drafter.put(draft, slots, position, taken.draft, copied)
    layers = put_layers(cache.layers, slots, position, taken.layers, copied)
    return Cache(layers, resume_slot(cache.slots, order), draft)


def resume_slot(slots: Slots, order: Resume) -> Slots:
    """The tables of a slot that knows the tokens of a snapshot; penalties see them as well."""
    slot = order.slot
    place = jnp.arange(order.tokens.size, dtype=jnp.int32)[None]
    valid, generated = place < order.position, place >= slots.prompt_length[slot]
    tokens = order.tokens[None]
    slots = replace(
        slots,
        length=slots.length.at[slot].set(order.position),
        pages=slots.pages.at[slot].set(order.pages),
        sampling=observe(slots.sampling, slot[None], tokens, valid, generated),
    )
    return record(slots, slot[None], tokens, jnp.where(valid, place, -1))
