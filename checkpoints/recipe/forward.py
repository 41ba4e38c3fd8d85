"""The decoder, differentiable: its three loops replaced, everything else as it serves.

`TrainingDecoder` is `k3jax.model.decoder.Decoder` with forms of the KDA recurrence, of latent
attention and of the experts that read and write no cache and have gradients. Its logits are the
decoder's on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.recipe.delta import check_bound, delta_rule
from checkpoints.recipe.experts import product, run_experts
from checkpoints.recipe.quantize import fake_quantize
from k3jax.config import K3Config
from k3jax.logical import ENDS, group_params, groups
from k3jax.model.decoder import Decoder
from k3jax.model.ffn import Moe
from k3jax.model.inputs import Residual, Tap, silent
from k3jax.model.mixers import Kda, Mla
from k3jax.parallel import alone
from k3jax.params import join_groups, pack
from k3jax.sizes import is_expert
from pallas_kernels.kda_common import gated_output, recurrence_inputs
from pallas_kernels.kda_types import TAPS, KdaRows

Params = dict[str, jax.Array]
ATTENDED = 512  # rows that attend at a time: what comes after them all is not computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A batch of B rows of T tokens, several documents in a row; what `StepPlan` is to serving.

    Documents are TAPS - 1 padding rows apart, or more: so far back the convolution reads.
    """

    tokens: jax.Array  # i32[B, T]
    first: jax.Array  # bool[B, T] starts a document, or a piece of one, from zero state
    valid: jax.Array  # bool[B, T] no padding
    key: Any = None  # of the dropout; None: there is none
    drop: Any = None  # f32[B] how much of each row's sublayer outputs is dropped
    kind: str = field(default="prefill", metadata={"static": True})

    @property
    def rows(self) -> jax.Array:
        """Rows of each that choose experts, i32[B]: all, since padding stands between others."""
        return jnp.full(self.tokens.shape[:1], self.tokens.shape[1], jnp.int32)


class TrainingKda(Kda):
    """KDA over whole documents."""

    number = 0  # of the sublayer in the stack

    def __call__(self, x: jax.Array, cache: Any, plan: Any, tap: Tap = silent) -> Any:
        """See `Kda`."""
        out, *found = super().__call__(x, cache, plan, tap)
        return dropped(out, plan, self.number), *found

    def mix(self, rows: KdaRows, cache: Any, plan: Any, tap: Any) -> Any:
        """See `Kda.mix`; there is no cache."""
        empty = jnp.zeros((), rows.qkv.dtype)
        rows = replace(rows, qkv=jnp.where(plan.valid[..., None], rows.qkv, empty))
        window = jnp.zeros((rows.qkv.shape[0], TAPS - 1, rows.qkv.shape[2]), rows.qkv.dtype)
        weights = self.weights()
        inputs = recurrence_inputs(rows, window, weights, self.lower_bound)
        # In bfloat16 training the products of the recurrence may run on NVIDIA's TF32 units.
        exact = jax.lax.Precision.HIGHEST if rows.qkv.dtype == jnp.float32 else None
        out = delta_rule(inputs, plan.first, plan.valid, exact)
        return gated_output(out, rows.gate, weights.o_norm, self.eps), None, *nothing(plan)


class TrainingMla(Mla):
    """Latent attention over whole documents."""

    number = 0  # of the sublayer in the stack

    def __call__(self, x: jax.Array, cache: Any, plan: Any, tap: Tap = silent) -> Any:
        """See `Mla`."""
        out, *found = super().__call__(x, cache, plan, tap)
        return dropped(out, plan, self.number), *found

    def attend(self, query: jax.Array, latents: jax.Array, cache: Any, plan: Any) -> Any:
        """See `Mla.attend`; there is no cache."""
        latents = latents.reshape(*plan.tokens.shape, -1)
        document = jnp.cumsum(plan.first.astype(jnp.int32), axis=1)
        length = document.shape[1]
        mixed = []
        for start in range(0, length, ATTENDED):
            stop = min(start + ATTENDED, length)
            here, seen = document[:, start:stop], document[:, :stop]
            causal = np.arange(start, stop)[:, None] >= np.arange(stop)[None]
            visible = (here[:, :, None] == seen[:, None, :]) & causal[None]
            before = latents[:, :stop]
            scores = product("bthd,bnd->bhtn", query[:, start:stop], before) * self.scale
            weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
            weights = weights.astype(query.dtype)
            mixed.append(product("bhtn,bnl->bthl", weights, before[..., : self.latent]))
        return jnp.concatenate(mixed, axis=1).astype(query.dtype), None, *nothing(plan)


class TrainingMoe(Moe):
    """Experts whose weights are rounded to MXFP4, but held in bfloat16."""

    def run_experts(self, z: jax.Array, experts: jax.Array, weights: jax.Array) -> Any:
        """See `Moe.run_experts`."""
        bank = self.bank()
        return run_experts(z, experts, weights, bank.w13, bank.w2, self.activation), jnp.uint32(0)


class TrainingDecoder(Decoder):
    """The decoder with its three loops replaced."""

    def __init__(self, config: K3Config, dtype: str):
        super().__init__(config, 1, "reference", dtype)
        for index, layer in enumerate(self.layers):
            kda = config.mixers[index] == "kda"
            layer.mixer = (TrainingKda if kda else TrainingMla)(config, 1, "reference")
            layer.mixer.number = 2 * index
            if config.ffns[index] == "moe":
                layer.ffn = TrainingMoe(config, 1, "reference")

    def start(self, plan: Any) -> Residual:
        """See `Decoder.start`."""
        hidden = embed(self.embed[...], plan.tokens.reshape(-1)).astype(self.dtype)
        blocks = jnp.zeros((self.max_blocks, *hidden.shape), hidden.dtype)
        return Residual(blocks, jnp.int32(0), hidden, jnp.zeros(hidden.shape, jnp.float32))


def nothing(plan: Any) -> tuple[jax.Array, jax.Array]:
    """The flags bool[B] and the health word of a forward that checks nothing."""
    return jnp.zeros(plan.tokens.shape[:1], bool), jnp.uint32(0)


@jax.custom_vjp
def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of table [V, D] for tokens i32[W]: [W, D]; its gradient is a product, no scatter."""
    return table[tokens]


def _embed_backward(kept: tuple[jax.Array, int], cotangent: jax.Array) -> tuple[jax.Array, Any]:
    tokens, size = kept
    chosen = tokens[:, None] == jnp.arange(size, dtype=jnp.int32)[None]
    gradient = product("wv,wd->vd", chosen.astype(cotangent.dtype), cotangent)
    return gradient.astype(cotangent.dtype), np.zeros(tokens.shape, jax.dtypes.float0)


embed.defvjp(
    lambda table, tokens: (embed(table, tokens), (tokens, table.shape[0])), _embed_backward
)


def unquantized(config: K3Config) -> K3Config:
    """The same model with experts in bfloat16: how training holds what MXFP4 will hold."""
    return replace(config, moe=replace(config.moe, mxfp4=False))


def abstract_training_decoder(config: K3Config, dtype: str) -> nnx.GraphDef:
    """The graph of the decoder in training; allocates nothing."""
    check_bound(config.kda.gate_lower_bound)
    build = partial(TrainingDecoder, unquantized(config), dtype)
    return nnx.split(nnx.eval_shape(build))[0]


def as_stored(params: Params, config: K3Config) -> dict[str, Any]:
    """Master weights f32 by logical name as the packed tree of what the checkpoint will hold.

    Experts are rounded to MXFP4, all else to its stored dtype; gradients go straight through.
    """
    plain = unquantized(config)
    packed = {}
    for group in groups(plain):
        start = "" if group == ENDS else f"{group}."
        stored = {}
        for name, spec in group_params(plain, group).items():
            value = params[start + name]
            if is_expert(start + name):
                value = fake_quantize(value)
            stored[name] = value.astype(jnp.bfloat16 if spec.dtype == "bf16" else jnp.float32)
        packed[group] = pack(stored, plain)
    return join_groups(packed)


def dropped(x: jax.Array, rows: Rows, number: int) -> jax.Array:
    """x f32[W, D] with the share of it dropped that its row wants; `number` is the sublayer's."""
    if rows.key is None:
        return x
    keep = 1.0 - jnp.repeat(rows.drop, rows.tokens.shape[1])[:, None]
    kept = jax.random.uniform(jax.random.fold_in(rows.key, number), x.shape) < keep
    return jnp.where(kept, x / keep, 0.0)


def forward(
    graph: nnx.GraphDef, packed: dict[str, Any], rows: Rows
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits f32[B * T, V], and the experts i32[B * T, J] chosen in each layer that has some."""
    with alone():
        decoder = nnx.merge(graph, packed)
        residual = decoder.start(rows)
        chosen = []
        for index, layer in enumerate(decoder.layers):
            layer_graph, state = nnx.split(layer)
            body = partial(
                run_layer,
                graph=layer_graph,
                starts_block=index % decoder.block == 0,
                number=2 * index + 1,
            )
            residual, experts = jax.checkpoint(body)(nnx.to_pure_dict(state), residual, rows)
            chosen += experts
        return decoder.logits(residual), chosen


def run_layer(
    params: Any,
    residual: Residual,
    rows: Rows,
    *,
    graph: nnx.GraphDef,
    starts_block: bool,
    number: int,
) -> tuple[Residual, list[jax.Array]]:
    """One layer: (the residual stream, the experts that it chose, if it has any)."""
    chosen = []

    def tap(name: str, value: jax.Array, sharded: int | None = None) -> None:
        if name == "router_experts":
            chosen.append(value)

    layer = nnx.merge(graph, params)
    residual, *_ = layer(residual, None, rows, starts_block=starts_block, tap=tap)
    return replace(residual, delta=dropped(residual.delta, rows, number)), chosen
