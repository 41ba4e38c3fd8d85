"""One training step, and the loss on held-out rows; both are compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from checkpoints.recipe.batches import Batch
from checkpoints.recipe.forward import (
    Params,
    Rows,
    abstract_training_decoder,
    as_stored,
    forward,
)
from checkpoints.recipe.optimize import FIXED, Schedule, kind_of, moved_bias
from k3jax.config import K3Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    params: Params  # f32 master weights by logical name
    bias: Params  # f32[E] the routers' correction biases
    optimizer: Any
    step: jax.Array  # i32[] steps taken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What a step tells."""

    nll: jax.Array  # f32[B] sum over each row of -ln p of the tokens that count
    count: jax.Array  # f32[B] such tokens
    gradient: jax.Array  # f32[] global norm before clipping
    load: jax.Array  # f32[layers, E] choices of each expert
    skipped: jax.Array  # bool[] the gradient was not finite, and nothing was changed


def split_bias(params: Params) -> tuple[Params, Params]:
    """(what gradients move, the routers' biases) of all master weights."""
    bias = {name: value for name, value in params.items() if kind_of(name) == FIXED}
    return {name: value for name, value in params.items() if name not in bias}, bias


def fresh_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    moved, bias = split_bias(params)
    return TrainState(moved, bias, optimizer.init(moved), jnp.int32(0))


def rows_loss(
    graph: nnx.GraphDef, config: K3Config, params: Params, batch: Batch, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """(-ln p summed over each row f32[B], choices of each expert f32[layers, E])."""
    logits, chosen = forward(graph, as_stored(params, config), rows)
    logits = logits.reshape(*batch.targets.shape, -1)
    label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == batch.targets[..., None]
    own = jnp.sum(jnp.where(label, logits, 0.0), axis=-1)
    nll = (jax.nn.logsumexp(logits, axis=-1) - own) * batch.weights
    real = batch.valid.reshape(-1)
    loads = [loads_of(experts, real, config.moe.num_experts) for experts in chosen]
    return jnp.sum(nll, axis=1), jnp.stack(loads)


def loads_of(experts: jax.Array, real: jax.Array, count: int) -> jax.Array:
    """How often each of `count` experts is among i32[W, J], in rows bool[W]: f32[E]."""
    each = experts[..., None] == jnp.arange(count, dtype=jnp.int32)[None, None]
    return jnp.sum(each & real[:, None, None], axis=(0, 1)).astype(jnp.float32)


def make_step(
    config: K3Config,
    dtype: str,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    seed: int,
    bias_rate: float,
) -> Any:
    """The compiled (state, batch, drop f32[B], steps i32[]) -> (state, metrics).

    The state is donated. `steps` are all that the schedule has: known late, they are an argument.
    The loss is the mean over the tokens that count. A step with a gradient that is not finite
    leaves the weights as they are.
    """
    graph = abstract_training_decoder(config, dtype)

    def loss(params: Params, bias: Params, batch: Batch, rows: Rows) -> tuple[jax.Array, Any]:
        nll, load = rows_loss(graph, config, params | bias, batch, rows)
        return jnp.sum(nll) / jnp.maximum(jnp.sum(batch.weights), 1.0), (nll, load)

    @partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, batch: Batch, drop: jax.Array, steps: jax.Array
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows = Rows(batch.tokens, batch.first, batch.valid, key, drop)
        gradient, (nll, load) = jax.grad(loss, has_aux=True)(state.params, state.bias, batch, rows)
        norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)))
        fine = jnp.isfinite(norm)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        share = schedule(state.step, steps)
        moved = {name: value + share * updates[name] for name, value in state.params.items()}
        bias = {
            name: moved_bias(value, load[index], bias_rate * share)
            for index, (name, value) in enumerate(sorted_layers(state.bias))
        }
        before = (state.params, state.bias, state.optimizer)
        after = jax.tree.map(
            lambda new, old: jnp.where(fine, new, old), (moved, bias, optimizer_state), before
        )
        metrics = Metrics(nll, jnp.sum(batch.weights, axis=1), norm, load, ~fine)
        return TrainState(*after, state.step + 1), metrics

    return step


def sorted_layers(bias: Params) -> list[tuple[str, jax.Array]]:
    """The routers' biases in the order of their layers."""
    return sorted(bias.items(), key=lambda item: int(item[0].split(".")[1]))


def make_judge(config: K3Config, dtype: str) -> Any:
    """The compiled (params, bias, batch) -> (-ln p f32[B] of each row, loads f32[layers, E])."""
    graph = abstract_training_decoder(config, dtype)

    @jax.jit
    def judge(params: Params, bias: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        rows = Rows(batch.tokens, batch.first, batch.valid)
        return rows_loss(graph, config, params | bias, batch, rows)

    return judge
