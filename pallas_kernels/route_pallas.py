"""Router on Triton: the skinny linear kernel for the logits, then a top-k with a program a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.linear_pallas import linear_pallas
from pallas_kernels.moe_reference import SUM_EPS

NAME = "route_top_k"
WARPS = 4  # of 896 experts each lane holds eight: few enough steps, few warps to agree


def route_pallas(
    x: jax.Array,  # [W, D]
    weight: jax.Array,  # [E, D]
    bias: jax.Array,  # f32[E]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    interpret: bool,
    warps: int = WARPS,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.route`."""
    logits = linear_pallas(
        x,
        weight,
        norm=None,
        eps=0.0,
        activation=None,
        add=None,
        out_dtype=jnp.float32,
        interpret=interpret,
    )
    shape = (x.shape[0], top_k)
    return launch.launch(
        functools.partial(_kernel, top_k=top_k, scaling=scaling, renormalize=renormalize),
        logits,
        bias,
        name=NAME,
        grid=(x.shape[0],),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        interpret=interpret,
        num_warps=warps,
    )


def _kernel(
    logits_ref,  # f32[W, E]
    bias_ref,  # f32[E]
    experts_ref,  # out i32[W, J]
    weights_ref,  # out f32[W, J]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
):
    row = pl.program_id(0)
    count = bias_ref.shape[0]
    expert = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    inside = expert < count
    at = jnp.minimum(expert, count - 1)
    logits = launch.load(logits_ref.at[launch.mesh(row, at)])
    biased = jax.nn.sigmoid(logits) + launch.load(bias_ref.at[at])
    ranked = jnp.where(biased == biased, biased, -jnp.inf)  # NaN last
    slot = jnp.arange(pl.next_power_of_2(top_k), dtype=jnp.int32)

    def choose(step, carry):
        left, chosen = carry
        best = jnp.max(jnp.where(left > 0, ranked, -jnp.inf))
        tied = (left > 0) & (ranked == best)
        winner = jnp.min(jnp.where(tied, expert, expert.size))
        return jnp.where(expert == winner, 0, left), jnp.where(slot == step, winner, chosen)

    start = (inside.astype(jnp.int32), jnp.zeros(slot.shape, jnp.int32))
    _, chosen = lax.fori_loop(0, top_k, choose, start)
    taken = slot < top_k
    weights = jax.nn.sigmoid(launch.load(logits_ref.at[launch.mesh(row, chosen)]))
    weights = jnp.where(taken, weights, 0.0)
    if renormalize:
        weights = weights / (jnp.sum(weights) + SUM_EPS)
    launch.store(experts_ref.at[launch.mesh(row, slot)], chosen, mask=taken)
    launch.store(weights_ref.at[launch.mesh(row, slot)], weights * scaling, mask=taken)
