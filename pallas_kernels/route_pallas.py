"""The router's choice on Triton: a top-k with a program a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.moe_reference import SUM_EPS

NAME = "route_top_k"
LOWEST = -(2**31)
WARPS = 4  # of 896 experts each lane holds eight: few enough steps, few warps to agree


def top_k_pallas(
    logits: jax.Array,  # f32[W, E]
    bias: jax.Array,  # f32[E]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    interpret: bool,
    warps: int = WARPS,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.choose`."""
    shape = (logits.shape[0], top_k)
    return launch.launch(
        functools.partial(_kernel, top_k=top_k, scaling=scaling, renormalize=renormalize),
        logits,
        bias,
        name=NAME,
        grid=(logits.shape[0],),
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
    **static,
):
    top_k_row(logits_ref, bias_ref, experts_ref, weights_ref, pl.program_id(0), **static)


def top_k_row(
    logits_ref,  # f32[W, E]
    bias_ref,  # f32[E]
    experts_ref,  # out i32[W, J]
    weights_ref,  # out f32[W, J]
    row,
    *,
    real=None,
    top_k: int,
    scaling: float,
    renormalize: bool,
):
    """Choose the experts of one row and their weights; none (-1, weight 0) if it is not `real`.

    That is asked for in the end, so that no load waits for it. A biased score stands as the integer
    of the same order, so that a score of NaN lies below all others and what is taken, or beyond the
    experts, below that.
    """
    count = bias_ref.shape[0]
    expert = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    at = jnp.minimum(expert, count - 1)
    logits = launch.load(logits_ref.at[launch.mesh(row, at)])
    biased = jax.nn.sigmoid(logits) + launch.load(bias_ref.at[at])
    biased = jnp.where(biased == 0, 0.0, biased)  # one zero, not two
    bits = lax.bitcast_convert_type(biased, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ranked = jnp.where(biased == biased, ordered, LOWEST + 1)
    ranked = jnp.where(expert < count, ranked, LOWEST)
    slot = jnp.arange(pl.next_power_of_2(top_k), dtype=jnp.int32)

    def choose(step, carry):
        ranked, chosen = carry
        winner = lax.argmax(ranked, 0, jnp.int32)  # the first among equals
        return jnp.where(expert == winner, LOWEST, ranked), jnp.where(slot == step, winner, chosen)

    _, chosen = lax.fori_loop(0, top_k, choose, (ranked, jnp.zeros(slot.shape, jnp.int32)))
    taken = slot < top_k
    weights = jax.nn.sigmoid(launch.load(logits_ref.at[launch.mesh(row, chosen)]))
    weights = jnp.where(taken, weights, 0.0)
    if renormalize:
        weights = weights / (jnp.sum(weights) + SUM_EPS)
    if real is not None:
        chosen, weights = jnp.where(real, chosen, -1), jnp.where(real, weights, 0.0)
    launch.store(experts_ref.at[launch.mesh(row, slot)], chosen, mask=taken)
    launch.store(weights_ref.at[launch.mesh(row, slot)], weights * scaling, mask=taken)
