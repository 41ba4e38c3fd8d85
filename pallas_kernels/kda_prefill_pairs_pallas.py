"""Pairs of a chunk's rows under the decay between them, inside a Pallas kernel.

With G the log decay summed up to each row, exp(G_i - G_j) is the product of a factor of row i and
one of row j, taken against a reference between or near them. L and A: see
kda_prefill_chunk_pallas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda_math import Maths

# The most rows that share a reference half way down their decay: exponents reach 16 rows x 5 = 80
# either way, whose exponentials float32 and bfloat16 hold.
BOUNDED_ROWS = 32
STRONGEST_BOUND = -5.0


Tile = Callable[[], jax.Array]  # reads f32[C, K]


def dot(left: jax.Array, right: jax.Array, contract: tuple[int, int], exact: bool) -> jax.Array:
    """Matrix product over one axis of each, summed in float32; not exact: tf32 where it exists."""
    wide = left.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision if wide else None,
        preferred_element_type=jnp.float32,
    )


def below(row: jax.Array, column: jax.Array, width: int | jax.Array) -> jax.Array:
    """Whether `row` is in the second half of a block of 2 `width`, and `column` in its first."""
    return ((row & -width) == (column & -width) + width) & (row & width != 0)


def row_sums(decay: jax.Array, factor: jax.Array) -> jax.Array:
    """Sum for each row the log2 decays [C, K], by its factors f32[C, C]: multiples of 1/2 up to 1.

    No product is rounded, and no sum is the difference of larger ones. Decays are float16, 11 bits
    as an operand of a tf32 product has, or float32.
    """
    return dot(factor.astype(decay.dtype), decay, (1, 0), decay.dtype == jnp.float32)


def pair_products(
    query: Tile,
    key: Tile,
    decay: jax.Array,
    row: jax.Array,
    column: jax.Array,
    *,
    maths: Maths,
    bounded: bool,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """L and A of C rows, f32[C, C] each and zero where they do not count.

    Decays of at least STRONGEST_BOUND a row, if `bounded`.
    """
    size = row.shape[0]
    exact = dtype == jnp.float32
    empty = jnp.zeros((size, size), jnp.float32)

    def products(carry, faded, right, places):
        """Put the products of rows times f32[C, K] with `right` where L, and where A, want them."""
        found = dot((key() * faded).astype(dtype), right, (1, 1), exact)
        key_pairs = jnp.where(places[0], found, carry[0])
        found = dot((query() * faded).astype(dtype), right, (1, 1), exact)
        return key_pairs, jnp.where(places[1], found, carry[1])

    def across_borders(level, carry):
        """Rows in two halves of a block meet at the border: decays to and from it are at most 1."""
        width = jnp.right_shift(jnp.int32(size // 2), level)
        border = (row & -2 * width) + width
        upper, lower = (column > row) & (column < border), (column <= row) & (column >= border)
        faded = maths.exp2(row_sums(decay, jnp.where(upper | lower, 1.0, 0.0)))
        meet = below(row, column, width)
        return products(carry, faded, (key() * faded).astype(dtype), (meet, meet))

    if bounded and size <= BOUNDED_ROWS:
        middle = row_sums(decay, jnp.where(column <= row, 0.5, -0.5))
        right = (key() * maths.exp2(-middle)).astype(dtype)
        places = (column < row, column <= row)
        return products((empty, empty), maths.exp2(middle), right, places)
    # Blocks of all widths leave the diagonal.
    own = jnp.sum(query() * key(), axis=1, keepdims=True)
    carry = (empty, jnp.where(row == column, own, 0.0))
    return lax.fori_loop(0, size.bit_length() - 1, across_borders, carry)


def unit_lower_inverse(
    pairs: jax.Array, row: jax.Array, column: jax.Array, *, exact: bool
) -> jax.Array:
    """(I + pairs)^-1 of a strictly lower triangular f32[C, C].

    Diagonal blocks of twice the width come from two inverses and the block below between them:
    [[X, 0], [-Y L X, Y]]. Powers of the matrix would cancel.
    """

    dtype = jnp.float32 if exact else jnp.float16  # the entries stay near 1

    def widen(level, inverse):
        width = jnp.left_shift(jnp.int32(1), level)
        narrow = inverse.astype(dtype)
        lower = jnp.where(below(row, column, width), pairs, 0.0).astype(dtype)
        inner = dot(lower, narrow, (1, 0), exact).astype(dtype)
        return inverse - dot(narrow, inner, (1, 0), exact)

    pairs_of_two = jnp.where(row == column, 1.0, jnp.where(below(row, column, 1), -pairs, 0.0))
    return lax.fori_loop(1, pairs.shape[0].bit_length() - 1, widen, pairs_of_two)
