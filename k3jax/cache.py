"""What a server remembers between steps, as device pytrees with pure functions on them.

Shape letters: S slots (0 is the null slot: padding reads and writes only there), P pages (0 is the
null page), Q pending rows, H heads, K key dim, V value dim, L+R latent and rope dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import CONV_WIDTH, K3Config
from k3jax.parallel import REPLICATED, shardings, spec
from k3jax.sampling import SamplingRow, SamplingState, make_sampling_state, reset_slot
from pallas_kernels import KdaCache, KdaPending, kda_commit

CONV_ROWS = CONV_WIDTH - 1  # raw projections kept; the current row is no part of them


@dataclass(frozen=True)
class CacheSizes:
    """How much a cache holds."""

    slots: int  # requests at a time, the null slot included
    pages: int  # of latents, the null page included
    page_size: int  # tokens
    max_pages: int  # of one request
    pending: int  # rows of a decode step that may be replayed, num_spec + 1


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


def make_cache(config: K3Config, sizes: CacheSizes, dtype: str, mesh: Mesh) -> Cache:
    """An empty cache, made where it lives; conv windows, latents and keys are of `dtype`."""
    build = jax.jit(
        lambda: _zeros(config, sizes, dtype), out_shardings=shardings(mesh, cache_specs(config))
    )
    return build()


def abstract_cache(config: K3Config, sizes: CacheSizes, dtype: str, mesh: Mesh) -> Cache:
    """Shapes, dtypes and shardings of `make_cache`'s result; allocates nothing."""
    shapes = jax.eval_shape(lambda: _zeros(config, sizes, dtype))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(mesh, cache_specs(config)),
    )


def cache_specs(config: K3Config) -> Cache:
    """The PartitionSpec of each leaf; the slots' tables are whole on every rank."""
    by_head: Any = spec(None, None, "heads")
    state: Any = spec(None, "heads")
    whole: Any = REPLICATED
    pending = KdaPending(conv=by_head, key=by_head, value=by_head, decay=by_head, beta=by_head)
    kda = KdaCache(conv=by_head, state=state, pending=pending)
    layers = tuple(kda if mixer == "kda" else MlaPages(whole) for mixer in config.mixers)
    slots = jax.eval_shape(lambda: _slots(config, CacheSizes(1, 1, 1, 1, 1)))
    return Cache(layers, jax.tree.map(lambda leaf: REPLICATED, slots))


def _zeros(config: K3Config, sizes: CacheSizes, dtype: str) -> Cache:
    kda, mla = config.kda, config.mla
    slots, rows = sizes.slots, sizes.pending
    heads, dim = kda.num_heads, kda.head_dim
    channels = 3 * heads * dim
    latents = (sizes.pages, sizes.page_size, mla.kv_lora_rank + mla.qk_rope_head_dim)

    def layer(mixer: str) -> LayerCache:
        if mixer == "mla":
            return MlaPages(jnp.zeros(latents, dtype))
        return KdaCache(
            conv=jnp.zeros((slots, CONV_ROWS, channels), dtype),
            state=jnp.zeros((slots, heads, dim, dim), jnp.float32),
            pending=KdaPending(
                conv=jnp.zeros((slots, rows, channels), dtype),
                key=jnp.zeros((slots, rows, heads, dim), dtype),
                value=jnp.zeros((slots, rows, heads, dim), dtype),
                decay=jnp.zeros((slots, rows, heads, dim), jnp.float32),
                beta=jnp.zeros((slots, rows, heads), jnp.float32),
            ),
        )

    return Cache(tuple(layer(mixer) for mixer in config.mixers), _slots(config, sizes))


def _slots(config: K3Config, sizes: CacheSizes) -> Slots:
    number = jnp.zeros((sizes.slots,), jnp.int32)
    return Slots(
        length=number,
        accepted=number,
        token=number,
        pages=jnp.zeros((sizes.slots, sizes.max_pages), jnp.int32),
        prompt_length=number,
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
        sampling=reset_slot(slots.sampling, slot, init.sampling),
    )


def commit(cache: Cache, slots: jax.Array, accepted: jax.Array) -> Cache:
    """Replay the accepted pending rows of slots i32[B] into conv windows and states.

    `accepted` i32[B] is clamped to [0, Q]; afterwards those slots have nothing pending. Slots
    outside [1, S) touch nothing. Works on whole arrays and on one rank's parts alike.
    """
    layers = tuple(
        kda_commit(layer, slots, accepted) if isinstance(layer, KdaCache) else layer
        for layer in cache.layers
    )
    table = cache.slots.accepted
    cleared = table.at[real_slots(slots, table.shape[0])].set(0, mode="drop")
    return Cache(layers, replace(cache.slots, accepted=cleared))


def real_slots(slots: jax.Array, size: int) -> jax.Array:
    """Slots i32[B] as indices for a scatter with mode "drop": those outside [1, size) drop."""
    return jnp.where((slots > 0) & (slots < size), slots, size)


def write_latents(
    cache: MlaPages, latents: jax.Array, pages: jax.Array, offsets: jax.Array
) -> MlaPages:
    """Store latents [W, L+R] at (pages, offsets) i32[W]; what goes to the null page is zeroed."""
    latents = jnp.where((pages > 0)[:, None], latents, jnp.zeros_like(latents))
    return MlaPages(cache.latents.at[pages, offsets].set(latents.astype(cache.latents.dtype)))


def number_of_pages(cache: Cache) -> int | None:
    """Pages of each MLA layer, the null page included; None without MLA layers."""
    pools = (layer.latents.shape[0] for layer in cache.layers if isinstance(layer, MlaPages))
    return next(pools, None)


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
