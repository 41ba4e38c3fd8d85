"""The optimizer: Muon for the layers' matrices, Adam for all else; the schedule; the router's bias.

Sources: Muon (kellerjordan.github.io/posts/muon) with the update size of arXiv 2502.16982; balance
without an auxiliary loss as in arXiv 2408.15664.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

UPDATE_RMS = 0.2  # of a Muon update at a learning rate of 1, as Adam's is
BY_ADAM = ("embed", "head", "moe.router", "kda.b", "kda.conv_q", "kda.conv_k", "kda.conv_v")
MUON, ADAM = "muon", "adam"
FIXED = "moe.bias"  # moved by the loads, not by a gradient


@dataclass(frozen=True)
class Schedule:
    """Warm-up, a constant part, and a linear way down to zero at the last step."""

    warmup: int  # steps
    cooldown: float  # of all steps

    def __call__(self, step: Any, steps: Any) -> jax.Array:
        """The share of the peak at a step counted from 0, of so many in all; f32[]."""
        step, steps = (jnp.asarray(number, jnp.float32) for number in (step, steps))
        up = (step + 1.0) / max(self.warmup, 1)
        down = (steps - step) / jnp.maximum(self.cooldown * steps, 1.0)
        return jnp.clip(jnp.minimum(up, down), 0.0, 1.0)


def kind_of(name: str) -> str:
    """A logical name without its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def make_optimizer(
    params: dict[str, Any],
    *,
    rate: float,
    adam_rate: float,
    decay: float,
    clip: float,
) -> optax.GradientTransformation:
    """For trees like `params`, {logical name: f32 array} without the router's biases.

    rate and adam_rate are the schedule's peaks, which the moves are for; decay is the matrices'.
    Parameters of one shape are moved as one stack: a tenth of the programs to compile and launch.
    """
    stacks = alike(params)
    matrix = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    chain = optax.chain(
        optax.clip_by_global_norm(clip),
        muon(
            rate,
            weight_decay=decay,
            adam_b2=0.95,
            adam_learning_rate=adam_rate,
            muon_weight_dimension_numbers={
                key: matrix if key.startswith(MUON) else None for key in stacks
            },
            consistent_rms=UPDATE_RMS,
        ),
    )

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        # optax is not written for strict promotion, which the tests ask for.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            moves, state = chain.update(stack(gradient, stacks), state, stack(params, stacks))
        return unstack(moves, stacks), state

    return optax.GradientTransformation(lambda tree: chain.init(stack(tree, stacks)), update)


def alike(params: dict[str, Any]) -> dict[str, list[str]]:
    """The names that share an optimizer and a shape, by a key that says both."""
    stacks: dict[str, list[str]] = {}
    for name, value in params.items():
        by_adam = len(value.shape) < 2 or kind_of(name) in BY_ADAM
        key = f"{ADAM if by_adam else MUON} {'x'.join(map(str, value.shape))}"
        stacks.setdefault(key, []).append(name)
    return stacks


def stack(tree: dict[str, Any], stacks: dict[str, list[str]]) -> dict[str, jax.Array]:
    """The arrays of each stack, one behind the other on a new first axis."""
    return {key: jnp.stack([tree[name] for name in names]) for key, names in stacks.items()}


def unstack(tree: dict[str, jax.Array], stacks: dict[str, list[str]]) -> dict[str, jax.Array]:
    """Undo `stack`."""
    return {
        name: tree[key][place] for key, names in stacks.items() for place, name in enumerate(names)
    }


def moved_bias(bias: jax.Array, load: jax.Array, rate: jax.Array) -> jax.Array:
    """The correction bias f32[E] after a step in which the experts got f32[E] of the choices.

    Each goes up or down by `rate` as its expert got less or more than an even share.
    """
    return bias + rate * jnp.sign(jnp.mean(load) - load)
