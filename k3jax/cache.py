"""What a server remembers between steps, as device pytrees with pure functions on them.

Shape letters: S slots (0 is the null slot: padding reads and writes only there), P pages (0 is the
null page), R rows of a ring, N drafts, H heads, K key dim, V value dim, L+R latent and rope dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import K3Config
from k3jax.parallel import REPLICATED, shardings, spec
from k3jax.prefix import NOTHING_KEPT, PrefixBudget
from k3jax.sampling import SamplingRow, SamplingState, make_sampling_state, reset_slot
from pallas_kernels import (
    KdaCache,
    KdaPending,
    KdaSnapshot,
    kda_commit,
    kda_put,
    kda_take,
    ring_rows,
)


@dataclass(frozen=True)
class CacheSizes:
    """How much a cache holds."""

    slots: int  # requests at a time, the null slot included
    pages: int  # of latents, the null page included
    page_size: int  # tokens
    max_pages: int  # of one request
    pending: int  # rows of a decode step that may be replayed, num_spec + 1
    history: int = 0  # tokens of each request that a drafter can read; 0: there is no drafter
    prefix: PrefixBudget = NOTHING_KEPT  # what is kept beside the cache, and of its pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlaPages:
    """Latents of one MLA layer: the normalized latent, then the raw rope part."""

    latents: jax.Array  # [P, page, L+R] compute dtype


LayerCache = KdaCache | MlaPages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What each request is at; every leaf has a leading S."""

    length: jax.Array  # i32[S] tokens in the caches, so the next row's position
    accepted: jax.Array  # i32[S] pending rows to replay; they count in `length`
    token: jax.Array  # i32[S] the next row: sampled, not yet in the caches
    pages: jax.Array  # i32[S, max_pages] page table
    prompt_length: jax.Array  # i32[S]
    history: jax.Array  # i32[S, tokens] by position, `token` included; of use to a drafter alone
    drafts: jax.Array  # i32[S, N] what a drafter thinks comes after `token`; -1: nothing
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotInit:
    """A request as it is admitted to a slot; numpy on the host."""

    prompt_length: Any  # i32[] without tokens that it generated before it was preempted
    sampling: SamplingRow


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Everything that a step takes and gives back."""

    layers: tuple[LayerCache, ...]
    slots: Slots
    draft: Any = None  # what the drafter keeps for itself


def make_cache(
    config: K3Config, sizes: CacheSizes, dtype: str, mesh: Mesh, draft: Any = None
) -> Cache:
    """An empty cache, made where it lives; conv windows, latents and keys are of `dtype`.

    `draft` is the tree of shapes and dtypes that a drafter keeps.
    """
    build = jax.jit(
        lambda: _zeros(config, sizes, dtype, draft),
        out_shardings=shardings(mesh, cache_specs(config, draft)),
    )
    return build()


def abstract_cache(
    config: K3Config, sizes: CacheSizes, dtype: str, mesh: Mesh, draft: Any = None
) -> Cache:
    """Shapes, dtypes and shardings of `make_cache`'s result; allocates nothing."""
    shapes = jax.eval_shape(lambda: _zeros(config, sizes, dtype, draft))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(mesh, cache_specs(config, draft)),
    )


def cache_specs(config: K3Config, draft: Any = None) -> Cache:
    """The PartitionSpec of each leaf; the slots' tables and `draft` are whole on every rank."""
    by_head: Any = spec(None, None, "heads")
    state: Any = spec(None, "heads")
    whole: Any = REPLICATED
    pending = KdaPending(key=by_head, update=by_head, decay=by_head)
    kda = KdaCache(conv=by_head, state=state, pending=pending)
    layers = tuple(kda if mixer == "kda" else MlaPages(whole) for mixer in config.mixers)
    slots = jax.eval_shape(lambda: _slots(config, CacheSizes(1, 1, 1, 1, 1)))
    return Cache(layers, *jax.tree.map(lambda leaf: REPLICATED, (slots, draft)))


def _zeros(config: K3Config, sizes: CacheSizes, dtype: str, draft: Any = None) -> Cache:
    kept = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), draft)
    return Cache(empty_layers(config, sizes, dtype), _slots(config, sizes), kept)


def empty_layers(config: K3Config, sizes: CacheSizes, dtype: str) -> tuple[LayerCache, ...]:
    """The cache of each layer, whole, full of zeros; to be traced."""
    kda, mla = config.kda, config.mla
    slots, ring = sizes.slots, ring_rows(sizes.pending)
    heads, dim = kda.num_heads, kda.head_dim
    channels = 3 * heads * dim
    latents = (sizes.pages, sizes.page_size, mla.kv_lora_rank + mla.qk_rope_head_dim)

    def layer(mixer: str) -> LayerCache:
        if mixer == "mla":
            return MlaPages(jnp.zeros(latents, dtype))
        return KdaCache(
            conv=jnp.zeros((slots, ring, channels), dtype),
            state=jnp.zeros((slots, heads, dim, dim), jnp.float32),
            pending=KdaPending(
                key=jnp.zeros((slots, ring, heads, dim), dtype),
                update=jnp.zeros((slots, ring, heads, dim), jnp.float32),
                decay=jnp.zeros((slots, ring, heads, dim), jnp.float32),
            ),
        )

    return tuple(layer(mixer) for mixer in config.mixers)


def _slots(config: K3Config, sizes: CacheSizes) -> Slots:
    number = jnp.zeros((sizes.slots,), jnp.int32)
    return Slots(
        length=number,
        accepted=number,
        token=number,
        pages=jnp.zeros((sizes.slots, sizes.max_pages), jnp.int32),
        prompt_length=number,
        # A column at least, whether or not there is a drafter: see `parallel.spmd`.
        history=jnp.zeros((sizes.slots, max(1, sizes.history)), jnp.int32),
        drafts=jnp.full((sizes.slots, max(1, sizes.pending - 1)), -1, jnp.int32),
        sampling=make_sampling_state(sizes.slots, config.vocab_size),
    )


def admit(slots: Slots, slot: jax.Array, init: SlotInit) -> Slots:
    """The slots with `slot` (i32[], >= 1) given to a new request: no tokens, no pages.

    Its recurrent state is not touched: a request without tokens starts from zero whatever its slot
    held.
    """
    return Slots(
        length=slots.length.at[slot].set(0),
        accepted=slots.accepted.at[slot].set(0),
        token=slots.token.at[slot].set(0),
        pages=slots.pages.at[slot].set(0),
        prompt_length=slots.prompt_length.at[slot].set(init.prompt_length),
        history=slots.history,
        drafts=slots.drafts.at[slot].set(-1),
        sampling=reset_slot(slots.sampling, slot, init.sampling),
    )


def commit(cache: Cache, slots: jax.Array, accepted: jax.Array) -> Cache:
    """Replay the accepted pending rows of slots i32[B] into the recurrent states.

    `accepted` i32[B] is clamped to what a step may bring; they are the last of the slots' rows.
    Afterwards those slots have nothing pending. Slots outside [1, S) touch nothing. Works on whole
    arrays and on one rank's parts alike.
    """
    starts = cache.slots.length.at[slots].get(mode="fill", fill_value=0)
    layers = tuple(
        kda_commit(layer, slots, starts, accepted) if isinstance(layer, KdaCache) else layer
        for layer in cache.layers
    )
    table = cache.slots.accepted
    cleared = table.at[real_slots(slots, table.shape[0])].set(0, mode="drop")
    return replace(cache, layers=layers, slots=replace(cache.slots, accepted=cleared))


def real_slots(slots: jax.Array, size: int) -> jax.Array:
    """Slots i32[B] as indices for a scatter with mode "drop": those outside [1, size) drop."""
    return jnp.where((slots > 0) & (slots < size), slots, size)


def write_latents(
    cache: MlaPages, latents: jax.Array, pages: jax.Array, offsets: jax.Array
) -> MlaPages:
    """Store latents [W, L+R] at (pages, offsets) i32[W]; what goes to the null page is zeroed."""
    latents = jnp.where((pages > 0)[:, None], latents, jnp.zeros_like(latents))
    return MlaPages(cache.latents.at[pages, offsets].set(latents.astype(cache.latents.dtype)))


def take_layers(
    layers: tuple[LayerCache, ...],
    slots: jax.Array,
    position: jax.Array,
    length: jax.Array,
    accepted: jax.Array,
) -> tuple[tuple[KdaSnapshot, ...], jax.Array]:
    """What the KDA layers know of slots i32[B] after their first `position` tokens, i32[B].

    `length` and `accepted` are those of the slots; the position must lie among the pending rows.
    Returns (a snapshot of each KDA layer, whether it does, bool[]).
    """
    pending = accepted - (length - position)
    fine = jnp.all((pending >= 0) & (pending <= accepted))
    kda = (layer for layer in layers if isinstance(layer, KdaCache))
    return tuple(kda_take(layer, slots, position, pending) for layer in kda), fine


def put_layers(
    layers: tuple[LayerCache, ...],
    slots: jax.Array,
    position: jax.Array,
    taken: tuple[KdaSnapshot, ...],
    pages: tuple[jax.Array, jax.Array],
) -> tuple[LayerCache, ...]:
    """The layers with what was taken at `position` i32[B] in slots i32[B].

    pages (i32[], i32[]): the first is copied to the second in every MLA layer.
    """
    source, target = pages
    snapshots = iter(taken)
    return tuple(
        kda_put(layer, slots, position, next(snapshots))
        if isinstance(layer, KdaCache)
        else MlaPages(layer.latents.at[target].set(layer.latents[source]))
        for layer in layers
    )


def number_of_pages(cache: Cache) -> int | None:
    """Pages of each MLA layer, the null page included; None without MLA layers."""
    pools = (layer.latents.shape[0] for layer in cache.layers if isinstance(layer, MlaPages))
    return next(pools, None)


def record(slots: Slots, chosen: jax.Array, tokens: jax.Array, positions: jax.Array) -> Slots:
    """The slots with tokens i32[B, T] of slots i32[B] at positions i32[B, T] of the history.

    What lies outside the history, or belongs to the null slot, is dropped.
    """
    size, room = slots.history.shape
    index = jnp.broadcast_to(real_slots(chosen, size)[:, None], tokens.shape)
    positions = jnp.where(positions >= 0, positions, room)
    return replace(slots, history=slots.history.at[index, positions].set(tokens, mode="drop"))


def page_bytes(config: K3Config, sizes: CacheSizes, dtype: str) -> int:
    """Bytes that one page takes on each rank, over all layers; latents are not split."""
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    itemsize = jnp.dtype(dtype).itemsize
    return config.mixers.count("mla") * sizes.page_size * width * itemsize


def fixed_bytes(config: K3Config, sizes: CacheSizes, dtype: str, tp: int) -> int:
    """Bytes that one rank's cache takes besides its pages: KDA slots and the slots' tables."""
    specs = jax.tree.leaves(
        cache_specs(config), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    shapes = jax.tree.leaves(jax.eval_shape(lambda: _zeros(config, replace(sizes, pages=0), dtype)))
    return sum(
        leaf.size * leaf.dtype.itemsize // (1 if entry == REPLICATED else tp)
        for leaf, entry in zip(shapes, specs, strict=True)
    )
