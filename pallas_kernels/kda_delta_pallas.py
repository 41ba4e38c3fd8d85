"""The delta rule over a block of rows and a whole state, inside a Pallas kernel.

The replayed rows come first, then the new ones. With G_i the log decay summed over the rows up to
i, S the state read and m the last replayed row:

    L_ij = k_i . exp(G_i - G_j) k_j  (j < i),   A_ij = q_i . exp(G_i - G_j) k_j  (j <= i)
    X = (I + diag(beta) L)^-1,                  Y = diag(beta) (V - (K exp(G)) S)
    O = (Q exp(G)) S + (A X) Y,                 S' = exp(G_m) S + ((K exp(G_m - G))^T X) Y

Source: Kimi Linear (arXiv 2510.26692), the WY form of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What the recurrence reads of the rows, all float32; zero in rows that do not count."""

    query: jax.Array  # [R, K] zero in replayed rows
    key: jax.Array  # [R, K]
    value: jax.Array  # [R, V]
    decay: jax.Array  # [R, K]
    beta: jax.Array  # [R, 1]


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over one axis of each; NVIDIA GPUs round the operands to tf32."""
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _finite(x: jax.Array) -> jax.Array:
    """Replace NaN and infinities by zero."""
    return jnp.where(x * 0.0 == 0.0, x, 0.0)


def _inverse(pairs: jax.Array, same_part: jax.Array, length: int) -> jax.Array:
    """(I + pairs)^-1 of a strictly lower triangular f32[R, R] with two diagonal blocks.

    Each block has `length` rows, so its power `length` is zero and (I + P)^-1 =
    (I - P)(I + P^2)(I + P^4)...; then the part below them, whose square is zero.
    """
    product = partial(_dot, contract=(1, 0))
    size = pairs.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    power = jnp.where(same_part, pairs, 0.0)
    inverse = jnp.where(row == column, 1.0, 0.0) - power
    order = 2
    while order < length:
        power = product(power, power)
        inverse += product(inverse, power)
        order *= 2
    return inverse - product(product(inverse, jnp.where(same_part, 0.0, pairs)), inverse)


def run_wy(
    inputs: Inputs, state: jax.Array, row: jax.Array, first_new: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """Run the block at once: (o f32[R, V], the state after the replayed rows).

    `length`: the most rows that either part has.
    A product would carry a NaN of one row into the others, rejected ones into the state: such rows
    are run as zeros, and their own o is NaN.
    """
    taint = inputs.value * 0.0 + inputs.beta * 0.0
    taint += jnp.sum((inputs.query + inputs.key + inputs.decay) * 0.0, axis=1, keepdims=True)
    inputs = jax.tree.map(_finite, inputs)
    size = row.shape[0]
    column = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    is_old = row < first_new
    column_sums = jnp.sum(jnp.where(is_old, inputs.decay, 0.0), axis=0)
    replayed = column_sums[None, :]
    # Decay from the last replayed row to each row; a replayed row's is above 1.
    grown = jnp.exp(lax.cumsum(inputs.decay, axis=0) - replayed)
    key_to, query_to, key_from = inputs.key * grown, inputs.query * grown, inputs.key / grown
    key_pairs = _dot(key_to, key_from, (1, 1))
    query_pairs = _dot(query_to, key_from, (1, 1))
    pairs = inputs.beta * jnp.where(column < row, key_pairs, 0.0)
    inverse = _inverse(pairs, is_old == (column < first_new), length)
    # The factor beta of X belongs to its columns; Y takes it instead.
    # The sign of the misfit is turned: a sum of a product and the state would become the product's
    # accumulator, and the state would change its layout for it, through shared memory.
    mixing = _dot(jnp.where(column <= row, -query_pairs, 0.0), inverse, (1, 0))
    writing = _dot(jnp.where(is_old, key_from, 0.0), inverse, (0, 0))  # [K, R]
    start = jnp.exp(replayed)
    misfit = _dot(key_to * start, state, (1, 0)) - inputs.value
    misfit *= inputs.beta
    out = _dot(query_to * start, state, (1, 0)) + _dot(mixing, misfit, (1, 0))
    after = state * jnp.exp(column_sums)[:, None] - _dot(writing, misfit, (1, 0))
    return out + taint, after


def run_steps(
    inputs: Inputs, state: jax.Array, row: jax.Array, counts: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Run the rows one after another: (o f32[R, V], the state after the replayed rows).

    `counts`: pending rows, the block's first new row, new rows.
    """
    pending, first_new, new = counts

    def pick(tile, number):
        return jnp.sum(jnp.where(row == number, tile, 0.0), axis=0)

    out = jnp.zeros_like(inputs.value)
    after = state
    for number in (*range(pending), *range(first_new, first_new + new)):
        key = pick(inputs.key, number)[:, None]
        state = state * jnp.exp(pick(inputs.decay, number))[:, None]
        error = pick(inputs.value, number) - jnp.sum(state * key, axis=0)
        state += key * (pick(inputs.beta, number) * error)[None, :]
        if number < first_new:
            after = state
        else:
            line = jnp.sum(state * pick(inputs.query, number)[:, None], axis=0)
            out = jnp.where(row == number, line[None, :], out)
    return out, after
