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
from pallas_kernels.mxfp4 import GROUP, LANES, WORD
from pallas_kernels.mxfp4_pallas import (
    Decoder,
    blocks_of,
    joined_pairs,
    load_words,
    pairs_cuda,
)


def in_weights_order(rows: jax.Array) -> jax.Array:
    """[..., K] with the columns of each group of 32 in the order of `scaled_weights`."""
    groups = rows.reshape(*rows.shape[:-1], -1, LANES, WORD // 2, 2)
    return jnp.swapaxes(groups, -3, -2).reshape(rows.shape)


def place_in_weights_order(column: jax.Array) -> jax.Array:
    """Where `in_weights_order` puts a column, i32."""
    lane, pair = column >> 3 & 3, column >> 1 & 3
    return (column & -GROUP) | pair << 3 | lane << 1 | (column & 1)


def scaled_weights(
    decoder: Decoder, words: jax.Array, scales: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """The weights of one block, [n, 32 G], of G groups: exact up to 2^128.

    words, scales: of `load_words`.
    """
    n, lanes, groups = words.shape
    shape = (n, lanes, groups)
    shift = lax.broadcasted_iota(jnp.uint32, shape, 2) * 8
    # 2^-127 is subnormal: bits of its own.
    bits = jnp.maximum((jnp.broadcast_to(scales, shape) >> shift & 0xFF) << 23, 1 << 22)
    if decoder.lowered:
        factor = bits >> 16 | bits
        pairs = [_scaled_pair(pair, factor) for pair in pairs_cuda(words[..., None])]
        values = joined_pairs(pairs, dtype)
    else:
        factor = lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
        values = decoder.decode(words[..., None], dtype) * factor[..., None]
    columns = values.reshape(*shape, WORD // 2, 2).transpose(0, 2, 3, 1, 4)
    return columns.reshape(n, groups * GROUP)


def _scaled_pair(pair: jax.Array, factor: jax.Array) -> jax.Array:
    """Two bfloat16 of u32 `pair` times 2^126, which decoding left out, and times those of `factor`.

    Two products, since one factor would leave bfloat16's range; two values an instruction.
    """
    [scaled] = launch.inline_asm(
        "{ .reg .b32 up; mov.b32 up, 0x7E807E80; mul.rn.bf16x2 up, $1, up;"
        " mul.rn.bf16x2 $0, up, $2; }",
        args=[pair, factor],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(pair.shape, jnp.int32)],
    )
    return scaled.astype(jnp.uint32)


def product(
    decoder: Decoder,
    words_ref,  # `tiled` u32[E, N / 8, blocks, 8 rows' block]
    scale_ref,  # `joined` u8[E, N, K / 32]
    rows_ref,  # [rows, K] in the order of weights
    expert: jax.Array,  # i32[]
    weight: jax.Array,  # i32[n] rows of its weights
    row: jax.Array,  # i32[R]
) -> jax.Array:
    """Some weights of an expert times some rows: f32[n, R]; n is a multiple of 16.

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
        return total + lax.dot_general(
            weights.transpose(1, 0, 2, 3).reshape(n, width),
            launch.load(rows_ref.at[launch.mesh(row, column)]),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    return lax.fori_loop(0, blocks, add, jnp.zeros((n, row.size), jnp.float32))
