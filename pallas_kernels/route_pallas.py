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
LOWEST, HIGHEST = -(2**31), 2**31 - 1
WARPS = 4  # of 896 experts each lane holds seven: few enough to sort, few warps to agree
WIDTH = 128  # keys in one array: a lane has one of them with four warps, four with one


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
        functools.partial(
            _kernel, warps=warps, top_k=top_k, scaling=scaling, renormalize=renormalize
        ),
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
    warps: int,  # of the program
    top_k: int,
    scaling: float,
    renormalize: bool,
):
    """Choose the experts of one row and their weights; none (-1, weight 0) if it is not `real`.

    That is asked for in the end, so that no load waits for it. Each warp chooses from its own
    share of the experts, so that the steps need no barrier; then they agree.
    """
    keys, experts = _sorted(*_scores(logits_ref, bias_ref, row, warps))
    slot = lax.broadcasted_iota(jnp.int32, (warps, pl.next_power_of_2(top_k)), 1)

    def choose(step, carry):
        keys, experts, best, chosen = carry
        key = jnp.max(keys[0], axis=1)[:, None]
        first = jnp.where(keys[0] == key, experts[0], HIGHEST)
        winner = jnp.min(first, axis=1)[:, None]  # the first among equals
        here, mine = slot == step, experts[0] == winner
        best, chosen = jnp.where(here, key, best), jnp.where(here, winner, chosen)
        return _pop(keys, mine, LOWEST), _pop(experts, mine, experts[-1]), best, chosen

    start = jnp.full(slot.shape, LOWEST, jnp.int32), jnp.zeros(slot.shape, jnp.int32)
    _, _, best, chosen = lax.fori_loop(0, top_k, choose, (keys, experts, *start))
    chosen = chosen[0] if warps == 1 else _merged(best, chosen)
    slot = jnp.arange(chosen.size, dtype=jnp.int32)
    taken = slot < top_k
    chosen = jnp.where(taken, chosen, 0)
    weights = jax.nn.sigmoid(launch.load(logits_ref.at[launch.mesh(row, chosen)]))
    weights = jnp.where(taken, weights, 0.0)
    if renormalize:
        weights = weights / (jnp.sum(weights) + SUM_EPS)
    if real is not None:
        chosen, weights = jnp.where(real, chosen, -1), jnp.where(real, weights, 0.0)
    launch.store(experts_ref.at[launch.mesh(row, slot)], chosen, mask=taken)
    launch.store(weights_ref.at[launch.mesh(row, slot)], weights * scaling, mask=taken)


def _scores(logits_ref, bias_ref, row, warps):
    """Return lists of keys and experts, i32[warps, keys] each, ascending by expert in a column.

    A key is the integer of a biased score's order, so that a score of NaN lies below all others and
    what is taken, or beyond the experts, below that. Each warp's experts follow those of the warp
    before.
    """
    count, shape = bias_ref.shape[0], (warps, WIDTH // warps)
    pieces = pl.cdiv(count, WIDTH)
    warp, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    experts = [(warp * pieces + piece) * shape[1] + column for piece in range(pieces)]
    places = [jnp.minimum(expert, count - 1) for expert in experts]
    logits = [launch.load(logits_ref.at[row, place]) for place in places]
    biases = [launch.load(bias_ref.at[place]) for place in places]
    keys = []
    for expert, logit, bias in zip(experts, logits, biases, strict=True):
        biased = jax.nn.sigmoid(logit) + bias
        biased = jnp.where(biased == 0, 0.0, biased)  # one zero, not two
        bits = lax.bitcast_convert_type(biased, jnp.int32)
        ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = jnp.where(biased == biased, ordered, LOWEST + 1)
        keys.append(jnp.where(expert < count, key, LOWEST))
    return keys, experts


def _sorted(keys, experts):
    """Sort each column's keys, greatest first; only neighbors change places, so equals never do."""
    keys, experts = list(keys), list(experts)
    for turn in range(len(keys)):
        for i in range(turn % 2, len(keys) - 1, 2):
            (a, b), (left, right) = keys[i : i + 2], experts[i : i + 2]
            keys[i : i + 2] = jnp.maximum(a, b), jnp.minimum(a, b)
            experts[i : i + 2] = jnp.where(b > a, right, left), jnp.where(b > a, left, right)
    return keys, experts


def _pop(values, mine, fill):
    """Drop the first of each column where `mine`; `fill` follows its last."""
    rest = [*values[1:], fill]
    return [jnp.where(mine, after, value) for value, after in zip(values, rest, strict=True)]


def _merged(keys, experts):
    """Return the first of i32[warps, choices] by key, as many as choices, of equals the first."""
    count, keys, experts = keys.shape[1], keys.reshape(-1), experts.reshape(-1)
    place = jnp.arange(keys.size, dtype=jnp.int32)
    mine, other = keys[:, None], keys[None, :]
    before = (other > mine) | ((other == mine) & (place[None, :] < place[:, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    here = rank[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.sum(jnp.where(here, experts[:, None], 0), axis=0)
