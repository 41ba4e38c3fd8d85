"""MXFP4 weights with their scales inside, for products with many rows.

The scales go into the weights, once for all rows, so that a product adds up a whole row of weights
by itself. Weights stay in the registers they are decoded in, where NVIDIA's warp-group instructions
take the left operand from; rows come through shared memory, their columns in the weights' order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.mxfp4 import GROUP, WORD
from pallas_kernels.mxfp4_pallas import Decoder, blocks_of, load_words, scale_bits


def in_weights_order(rows: jax.Array) -> jax.Array:
    """[..., K] with the columns of each group of 32 in the order of `scaled_weights`.

    As a gather: XLA's transposition of pairs takes 15 times as long.
    """
    return rows[..., place_in_weights_order(jnp.arange(rows.shape[-1], dtype=jnp.int32))]


def place_in_weights_order(column: jax.Array) -> jax.Array:
    """Where `in_weights_order` puts a column, and what column it puts there: i32."""
    lane, pair = column >> 3 & 3, column >> 1 & 3
    return (column & -GROUP) | pair << 3 | lane << 1 | (column & 1)


def scaled_weights(
    decoder: Decoder, words: jax.Array, scales: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """The weights of one block, [n, 32 G], of G groups: exact up to 2^128.

    words, scales: of `load_words`.
    """
    n, lanes, groups = words.shape
    values = decoder.scaled(words[..., None], scale_bits(scales, groups), dtype)
    columns = values.reshape(n, lanes, groups, WORD // 2, 2).transpose(0, 2, 3, 1, 4)
    return columns.reshape(n, groups * GROUP)


def product(
    decoder: Decoder,
    words_ref,  # `tiled` u32[E, N / 8, blocks, 8 rows' block]
    scale_ref,  # `joined` u8[E, N, K / 32]
    rows_ref,  # [rows, K] in the order of weights
    expert: jax.Array,  # i32[]
    weight: jax.Array,  # i32[n] rows of its weights
    row: jax.Array,  # i32[R]
    inside: jax.Array,  # bool[R]
) -> jax.Array:
    """Some weights of an expert times some rows: f32[n, R]; n is a multiple of 16.

    Rows that are not `inside` count as zeros and are not loaded.

    Four warps load 32 rows of weights at once, eight a warp, but multiply 16 neighboring ones each.
    So that a lane multiplies what it loaded, neighbors by eight are loaded apart.
    """
    blocks, groups = blocks_of(words_ref)
    width, dtype, n = groups * GROUP, rows_ref.dtype, weight.size
    apart = weight.reshape(n // 16, 2, 8).transpose(1, 0, 2).reshape(n)

    def add(block, total):
        words, scales = load_words(words_ref, scale_ref, expert, apart, block, groups)
        weights = scaled_weights(decoder, words, scales, dtype).reshape(2, n // 16, 8, width)
        column = block * width + jnp.arange(width, dtype=jnp.int32)
        mask = jnp.broadcast_to(inside[:, None], (row.size, width))
        rows = launch.load(rows_ref.at[launch.mesh(row, column)], mask=mask, other=0.0)
        return total + lax.dot_general(
            weights.transpose(1, 0, 2, 3).reshape(n, width),
            rows,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    return lax.fori_loop(0, blocks, add, jnp.zeros((n, row.size), jnp.float32))
