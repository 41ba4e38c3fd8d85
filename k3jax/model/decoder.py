"""The decoder: embedding, layers with their residual bookkeeping, logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache import LayerCache
from k3jax.config import K3Config
from k3jax.model.ffn import Dense, Moe
from k3jax.model.inputs import Residual, StepPlan, Tap, few_rows, silent
from k3jax.model.mixers import Kda, Mla, weight
from k3jax.parallel import gather, psum, rank, world
from pallas_kernels import Impl, attn_res, attn_res_mix, attn_res_weights, linear, rms_norm

LayerResult = tuple[Residual, LayerCache, jax.Array, jax.Array]  # flags bool[B], health u32[]
# A kernel that does a whole layer: (packed params of the layer, residual, cache, plan) -> result.
LayerKernel = Callable[[Any, Residual, LayerCache, StepPlan], LayerResult]


def no_kernel(index: int) -> LayerKernel | None:
    """The stock path: no layer is replaced."""
    return None


class Layer(nnx.Module):
    """Token mixer and feed-forward half, each behind a residual mix and a norm."""

    def __init__(self, config: K3Config, index: int, tp: int, impl: Impl):
        hidden, self.eps, self.impl = config.hidden_size, config.rms_norm_eps, impl
        self.attn_norm, self.ffn_norm = weight(hidden), weight(hidden)
        mixes = config.attn_res_block is not None
        self.attn_res_norm = weight(hidden) if mixes else None
        self.attn_res_proj = weight(hidden) if mixes else None
        self.ffn_res_norm = weight(hidden) if mixes else None
        self.ffn_res_proj = weight(hidden) if mixes else None
        self.mixer: Any = (Kda if config.mixers[index] == "kda" else Mla)(config, tp, impl)
        self.ffn = (Dense if config.ffns[index] == "dense" else Moe)(config, tp, impl)

    def __call__(
        self,
        residual: Residual,
        cache: LayerCache,
        plan: StepPlan,
        *,
        starts_block: bool,
        tap: Tap = silent,
    ) -> LayerResult:
        """One layer; `starts_block`: its input becomes the next residual block."""
        options: dict[str, Any] = {"eps": self.eps, "impl": self.impl, "tap": tap}
        query = (self.attn_res_norm, self.attn_res_proj)
        normed, hidden = enter(residual, query, self.attn_norm, name="attn", **options)
        residual = start_block(residual, hidden) if starts_block else replace(residual, part=hidden)
        mixed, cache, flags, health = self.mixer(normed, cache, plan, tap)
        tap("attn_out", mixed.astype(normed.dtype))
        query = (self.ffn_res_norm, self.ffn_res_proj)
        residual = replace(residual, delta=mixed)
        normed, hidden = enter(residual, query, self.ffn_norm, name="ffn", **options)
        delta, ffn_health = self.ffn(normed, plan.rows, tap)
        tap("ffn_out", delta.astype(hidden.dtype))
        tap("out", add(hidden, delta))
        residual = replace(residual, part=hidden, delta=delta)
        return residual, cache, flags, health | ffn_health


def start_block(residual: Residual, hidden: jax.Array) -> Residual:
    """Store the layer input [W, D] as the next block and go on from zero."""
    blocks = jax.lax.dynamic_update_index_in_dim(residual.blocks, hidden, residual.count, 0)
    return replace(residual, blocks=blocks, count=residual.count + 1, part=jnp.zeros_like(hidden))


def add(part: jax.Array, delta: jax.Array) -> jax.Array:
    """[W, D] + f32[W, D], rounded once to the dtype of `part`."""
    return (part.astype(jnp.float32) + delta).astype(part.dtype)


def enter(
    residual: Residual,
    query: tuple[nnx.Param | None, nnx.Param | None],
    norm: nnx.Param,
    *,
    name: str,
    eps: float,
    impl: Impl,
    tap: Tap,
) -> tuple[jax.Array, jax.Array]:
    """Norm of the residual mix [W, D], and part + delta [W, D]; `query` is the mix's norm, proj."""
    if query[0] is None or query[1] is None:
        hidden = add(residual.part, residual.delta)
        normed = rms_norm(hidden, norm[...], eps=eps)
    else:
        blocks, count = residual.blocks, residual.count
        queries = (query[0][...], query[1][...])
        normed, hidden = attn_res(
            blocks,
            count,
            residual.part,
            *queries,
            norm[...],
            delta=residual.delta,
            eps=eps,
            impl=impl,
        )
        if tap is not silent:
            tap(f"{name}_res", attn_res_mix(blocks, count, hidden, *queries, eps=eps))
            tap(f"{name}_res_weights", attn_res_weights(blocks, count, hidden, *queries, eps=eps))
    tap(f"{name}_in", normed)
    return normed, hidden


class Decoder(nnx.Module):
    """The whole text model, one rank's part; `dtype` is that of activations and caches."""

    def __init__(self, config: K3Config, tp: int, impl: Impl, dtype: str):
        hidden, vocabulary = config.hidden_size, config.vocab_size // tp
        self.impl, self.dtype, self.eps = impl, dtype, config.rms_norm_eps
        self.block = config.attn_res_block
        self.max_blocks = 0 if self.block is None else config.attn_res_blocks
        self.embed = weight(vocabulary, hidden)
        self.head = weight(vocabulary, hidden)
        self.norm = weight(hidden)
        self.res_norm = weight(hidden) if self.block else None
        self.res_proj = weight(hidden) if self.block else None
        self.layers = nnx.List(Layer(config, i, tp, impl) for i in range(config.num_layers))

    def start(self, plan: StepPlan) -> Residual:
        """Embed the step's tokens; the residual stream before layer 0."""
        local = plan.tokens.reshape(-1) - rank() * self.embed.shape[0]
        table = self.embed[...]
        inside = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        hidden = psum(jnp.where(inside[:, None], rows, jnp.zeros_like(rows)).astype(self.dtype))
        blocks = jnp.zeros((self.max_blocks, *hidden.shape), hidden.dtype)
        return Residual(blocks, jnp.int32(0), hidden, jnp.zeros(hidden.shape, jnp.float32))

    def run(
        self,
        residual: Residual,
        caches: tuple[LayerCache, ...],
        plan: StepPlan,
        *,
        kernel: Callable[[int], LayerKernel | None] = no_kernel,
        tap: Tap = silent,
    ) -> tuple[Residual, tuple[LayerCache, ...], jax.Array, jax.Array]:
        """All layers, each by its kernel if it has one; flags bool[B] and health u32[] ORed."""
        flags, health = jnp.zeros(plan.slots.shape, bool), jnp.uint32(0)
        done: list[LayerCache] = []
        for index, layer in enumerate(self.layers):
            graph, state = nnx.split(layer)
            params = nnx.to_pure_dict(state)
            replaced = kernel(index)
            if replaced is not None:
                result = replaced(params, residual, caches[index], plan)
            else:
                *result, taps = layer_body(
                    params,
                    residual,
                    caches[index],
                    plan,
                    graph=graph,
                    starts_block=self.block is not None and index % self.block == 0,
                    tracing=tap is not silent,
                    ranks=world(),
                )
                for name, value in taps.items():
                    tap(f"layers.{index}.{name}", value)
            residual, cache, layer_flags, layer_health = result
            done.append(cache)
            flags, health = flags | layer_flags, health | layer_health
        return residual, tuple(done), flags, health

    def logits(self, residual: Residual, tap: Tap = silent) -> jax.Array:
        """Residual stream after the last layer -> logits f32[W, vocabulary]."""
        query = (self.res_norm, self.res_proj)
        normed, _ = enter(
            residual, query, self.norm, name="output", eps=self.eps, impl=self.impl, tap=tap
        )
        impl = few_rows(self.impl, normed)
        part = linear(normed, self.head[...], out_dtype=jnp.float32, impl=impl)
        return gather(part, axis=1)


def collect_into(taps: dict[str, jax.Array]) -> Tap:
    """A Tap that keeps every intermediate by its name, whole on every rank."""

    def collect(name: str, value: jax.Array, sharded: int | None = None) -> None:
        taps[name] = value if sharded is None else gather(value, sharded)

    return collect


@partial(jax.jit, static_argnames=("graph", "starts_block", "tracing", "ranks"))
def layer_body(
    params: Any,
    residual: Residual,
    cache: LayerCache,
    plan: StepPlan,
    *,
    graph: nnx.GraphDef,
    starts_block: bool,
    tracing: bool,
    ranks: int,
) -> tuple[Residual, LayerCache, jax.Array, jax.Array, dict[str, jax.Array]]:
    """One layer as a function that all layers of its kind share, traced and lowered once.

    The last result holds the named intermediates, whole on every rank, if `tracing`. What was
    traced for one number of `ranks` is no other's.
    """
    taps: dict[str, jax.Array] = {}
    layer = nnx.merge(graph, params)
    tap = collect_into(taps) if tracing else silent
    residual, cache, flags, health = layer(
        residual, cache, plan, starts_block=starts_block, tap=tap
    )
    return residual, cache, flags, health, taps


def take_rows(residual: Residual, rows: jax.Array) -> Residual:
    """The residual stream of some rows, i32[N] in [0, W)."""
    return replace(
        residual,
        blocks=residual.blocks[:, rows],
        part=residual.part[rows],
        delta=residual.delta[rows],
    )


def abstract_decoder(
    config: K3Config, tp: int, impl: Impl, dtype: str
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The decoder's graph and the tree of its parameters, one rank's shapes; allocates nothing.

    `nnx.merge(graph, params)` makes it whole again from a plain dict of that shape.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, tp, impl, dtype)))
    return graph, nnx.to_pure_dict(state)
