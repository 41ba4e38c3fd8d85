"""Decode and multiply MXFP4 words in registers, inside a kernel.

The word layout of mxfp4.py is the operand layout of the tensor cores: in a program of one warp, a
lane's vector of neighboring words, loaded as it lies, holds just the values which that lane feeds
to its matrix instructions. So the weights never pass through shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.mxfp4 import (
    GATHER,
    GATHERED,
    GROUP,
    KEPT,
    LANES,
    ROWS,
    TURN,
    WORD,
    block_groups,
    gather,
    in_order,
)
from pallas_kernels.target import amd_arch

HALF = 0x3F00  # 0.5 in bfloat16: the smallest magnitude above zero
LOWERED = 126  # powers of two by which `decode_cuda` is too small
SMALLEST = 1 << 22  # bits of 2^-127 in float32: subnormal
LIFT = 96  # powers of two by which the rows are raised in exchange, before the sums


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How words become values: `decode(u32[..., 1], dtype) -> [..., 8]`, without the scale.

    The values are 2^-`lowered` times too small; `multiply` and `raised` make up for it. `scaled`
    has no such debt: it also takes the bits of the words' scales in float32, u32[...].
    """

    decode: Callable[[jax.Array, jnp.dtype], jax.Array]
    scaled: Callable[[jax.Array, jax.Array, jnp.dtype], jax.Array]
    lowered: int = 0
    ready: bool = False  # rows come lifted
    fused: bool = False  # multiply and add in one instruction, which XLA does not do by itself

    @property
    def lift(self) -> int:
        return LIFT if self.lowered else 0

    def accumulate(self, sums: jax.Array, factor: jax.Array, total: jax.Array) -> jax.Array:
        """total + sums * factor, all f32[n, R]."""
        if not self.fused:
            return total + sums * factor
        return launch.multiply_add(sums, factor, total)


def joined(scales: jax.Array) -> jax.Array:
    """View of u8[E, N, K/32] as kernels take it: an integer [E, N, blocks] of a block's scales."""
    experts, rows, width = scales.shape
    groups = block_groups(width * GROUP)
    dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[groups]
    blocks = (experts, rows, width // groups)
    if groups == 1:
        return scales
    return lax.bitcast_convert_type(scales.reshape(*blocks, groups), dtype)


def scale_values(scales: jax.Array, group: int) -> jax.Array:
    """2^(scale - 127) of one group's E8M0 byte in float32, from a block's scales u32.

    Infinity for 255, so no sum of it is finite.
    """
    place = 23 - 8 * group
    moved = scales << place if place >= 0 else scales >> -place
    bits = jnp.maximum(moved & jnp.uint32(0xFF << 23), jnp.uint32(SMALLEST))
    return lax.bitcast_convert_type(bits, jnp.float32)


def scale_bits(scales: jax.Array, groups: int) -> jax.Array:
    """Bits of 2^(scale - 127) in float32, u32[n, LANES, G], from the scales of `load_words`.

    Infinity for 255.
    """
    shape = (*scales.shape[:-1], groups)
    shift = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * 8
    return jnp.maximum((jnp.broadcast_to(scales, shape) >> shift & 0xFF) << 23, SMALLEST)


def decode(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decode by integer operations any GPU has: exact, float32 or bfloat16."""
    code = _moved(words, WORD, 4)
    magnitude = code & jnp.uint32(7)
    normal = (magnitude << 6) + jnp.uint32(HALF)  # a 2-bit exponent and a mantissa bit
    bits = jnp.where(magnitude > 1, normal, magnitude * jnp.uint32(HALF))
    bits |= (code & jnp.uint32(8)) << 12
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(bits << 16, jnp.float32)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def decode_cuda(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decode to bfloat16 times 2^-126 on NVIDIA GPUs: 8 operations for eight values.

    The bits of a word lie as mxfp4.PLACES says. The three bits of a magnitude at the border of
    exponent and mantissa are the value times 2^-126, the subnormal one too: the tensor cores
    multiply subnormal values exactly.
    """
    return joined_pairs(pairs_cuda(words), dtype)


def pairs_cuda(words: jax.Array) -> list[jax.Array]:
    """The values of a word's neighboring columns, two bfloat16 each, times 2^-126: 4 u32[...]."""
    turned = (words >> TURN) | (words << (32 - TURN))
    gathered = (turned & jnp.uint32(GATHERED)) * jnp.uint32(GATHER)
    return [(pair & jnp.uint32(KEPT))[..., 0] for pair in (words, words << 3, turned, gathered)]


def joined_pairs(pairs: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Four pairs of columns u32[...] as bfloat16[..., 8]."""
    first, second, third, fourth = pairs
    halves = jnp.stack([first, third], axis=-1), jnp.stack([second, fourth], axis=-1)
    return _halves(jnp.stack(halves, axis=-1).reshape(*first.shape, WORD // 2), dtype)


def scaled_cuda(words: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`decode_cuda` times 2^126 and times the scales, two values an instruction.

    Two products, for one factor would leave bfloat16's range.
    """
    factor = scales >> 16 | scales

    def times(pair: jax.Array) -> jax.Array:
        [scaled] = launch.inline_asm(
            "{ .reg .b32 up; mov.b32 up, 0x7E807E80; mul.rn.bf16x2 up, $1, up;"
            " mul.rn.bf16x2 $0, up, $2; }",
            args=[pair, factor],
            constraints="=r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(pair.shape, jnp.int32)],
        )
        return scaled.astype(jnp.uint32)

    return joined_pairs([times(pair) for pair in pairs_cuda(words)], dtype)


def decode_cuda_exact(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decode what NVIDIA's GPUs keep by integer operations: exact, float32 or bfloat16."""
    return decode(gather(words), dtype)


def decode_here(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decode what this platform keeps, outside compiled kernels."""
    return decode(in_order(words), dtype)


def decode_gfx950(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decode to bfloat16 with the scaled conversion of gfx950: two values an instruction."""
    return _convert_gfx950(words, [], "1.0", dtype)


def scaled_gfx950(words: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same with the scales, of which the conversion takes the exponent."""
    scales = lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    return _convert_gfx950(words, [scales], "$2", dtype)


def _convert_gfx950(words: jax.Array, scales: list, scale: str, dtype: jnp.dtype) -> jax.Array:
    codes = _moved(words, WORD // 2, 8)
    [pairs] = launch.inline_asm(
        f"v_cvt_scalef32_pk_bf16_fp4 $0, $1, {scale}",
        args=[codes, *(jnp.broadcast_to(each, codes.shape) for each in scales)],
        constraints="=v,v" + ",v" * len(scales),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int32)],
    )
    return _halves(pairs.astype(jnp.uint32), dtype)


def _moved(words: jax.Array, count: int, bits: int) -> jax.Array:
    """u32[..., 1] -> u32[..., count], moved down by 0, 1, 2 .. times `bits`."""
    shape = (*words.shape[:-1], count)
    shift = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(bits)
    return jnp.broadcast_to(words, shape) >> lax.broadcast_in_dim(shift, shape, (words.ndim - 1,))


def _halves(pairs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The two bfloat16 of each word, the lower first: u32[..., 4] -> [..., 8]."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"this decoder gives bfloat16, not {jnp.dtype(dtype).name}")
    both = jnp.stack([part.astype(jnp.uint16) for part in (pairs, pairs >> 16)], axis=-1)
    values = both.reshape(*pairs.shape[:-1], WORD)
    return lax.bitcast_convert_type(values, jnp.bfloat16)


def _times(decode: Callable[[jax.Array, jnp.dtype], jax.Array]) -> Callable[..., jax.Array]:
    """`decode`, and a product with the scales behind it."""

    def scaled(words: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
        factor = lax.bitcast_convert_type(scales, jnp.float32).astype(dtype)
        return decode(words, dtype) * factor[..., None]

    return scaled


PORTABLE = Decoder(decode, _times(decode))
CUDA = Decoder(decode_cuda, scaled_cuda, lowered=LOWERED, fused=True)
CUDA_EXACT = Decoder(decode_cuda_exact, _times(decode_cuda_exact), fused=True)
GFX950 = Decoder(decode_gfx950, scaled_gfx950)
INTERPRETED = Decoder(decode_here, _times(decode_here))


def decoders(dtype: jax.typing.DTypeLike, *, interpret: bool) -> tuple[Decoder, Decoder]:
    """The decoders for rows of `dtype` on NVIDIA's GPUs and on all others."""
    if dtype != jnp.bfloat16:
        return CUDA_EXACT, INTERPRETED if interpret else PORTABLE
    if interpret:
        return CUDA, INTERPRETED
    return CUDA, GFX950 if amd_arch() == "gfx950" else PORTABLE


def core_order(columns: jax.Array) -> jax.Array:
    """[n, LANES, 8] -> [n, 32], pairs of neighboring columns of all lanes in turn."""
    n = columns.shape[0]
    pairs = columns.reshape(n, LANES, WORD // 2, 2).transpose(0, 2, 1, 3)
    return pairs.reshape(n, GROUP)


def prepared(decoder: Decoder, rows: jax.Array) -> tuple[jax.Array, Decoder]:
    """Rows lifted once, and the decoder that takes them so."""
    return lift(decoder, rows), dataclasses.replace(decoder, ready=True)


def lift(decoder: Decoder, rows: jax.Array) -> jax.Array:
    """Rows raised as far as products with the decoder's values want it."""
    return rows * jnp.asarray(2.0**decoder.lift, rows.dtype) if decoder.lift else rows


def _right_operand(rows: jax.Array) -> jax.Array:
    """[R, 32] -> [32, R] in the order of `core_order`.

    Transposed here and not by the product, whose transposition would pass through shared memory.
    """
    pairs = rows.reshape(rows.shape[0], LANES, WORD // 2, 2)
    return pairs.transpose(2, 1, 3, 0).reshape(GROUP, rows.shape[0])


def tiled(words: jax.Array) -> jax.Array:
    """View of u32[E, N, K/8] as kernels take it: [E, N/8, blocks, words of eight rows' block]."""
    experts, rows, width = words.shape
    block = LANES * block_groups(width * WORD)
    return words.reshape(experts, rows // ROWS, width // block, ROWS * block)


def blocks_of(words_ref) -> tuple[int, int]:
    """Blocks of a row of `tiled` words, and groups of a block."""
    blocks, words = words_ref.shape[2:]
    return blocks, words // (ROWS * LANES)


def load_words(words_ref, scale_ref, expert, row, block, groups):
    """Words u32[n, LANES, groups] and scales u32[n, LANES, 1] of one block of some rows.

    row: i32[n]; block: i32[] or i32[n]. The scales are loaded once for each lane, where the sums of
    that lane need them.
    """
    width = LANES * groups
    place = (
        lax.rem(row, jnp.int32(ROWS))[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None, :]
    )
    octet = jnp.broadcast_to(lax.div(row, jnp.int32(ROWS))[:, None], place.shape)
    block = jnp.broadcast_to(block, row.shape)
    beside = jnp.broadcast_to(block[:, None], place.shape)
    words = launch.load(
        words_ref.at[jnp.broadcast_to(expert, place.shape), octet, beside, place],
        eviction_policy="evict_first",
    )
    shape = (row.size, LANES)
    indices = (jnp.broadcast_to(expert, row.shape), row, block)
    at = tuple(lax.broadcast_in_dim(index, shape, (0,)) for index in indices)
    scales = launch.load(scale_ref.at[at]).astype(jnp.uint32)
    return words.reshape(*shape, groups), scales[..., None]


def load_operands(decoder: Decoder, rows_ref, row, block, groups, mask=None):
    """What the weights of one block multiply, from some rows [R]: a [32, R] per group."""
    parts = []
    block = jnp.broadcast_to(block, row.shape)
    for group in range(groups):
        start = (block * groups + group) * GROUP
        column = start[:, None] + jnp.arange(GROUP, dtype=jnp.int32)[None, :]
        at = (jnp.broadcast_to(row[:, None], column.shape), column)
        other = None if mask is None else 0.0
        mask_at = None if mask is None else jnp.broadcast_to(mask[:, None], (row.size, GROUP))
        x = launch.load(rows_ref.at[at], mask=mask_at, other=other, eviction_policy="evict_last")
        parts.append(_right_operand(x if decoder.ready else lift(decoder, x)))
    return parts


def multiply(decoder: Decoder, words, scales, operands, total) -> jax.Array:
    """Add the weights of one block by rows to f32[n, R], 2^(lift - lowered) times too large.

    words, scales: of `load_words`; operands: of `load_operands`. Each group's sums take its scale:
    they are added up in any case.
    """
    n, count = words.shape[0], words.shape[2]
    for group, (word, right) in enumerate(zip(_each(words, count), operands, strict=True)):
        sums = lax.dot_general(
            core_order(decoder.decode(word, right.dtype)),
            right,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if right.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        factor = _beside_sums(scale_values(scales, group), n, right.shape[1])
        total = decoder.accumulate(sums, factor, total)
    return total


def _each(array, count):
    """[..., count] -> count arrays [..., 1]."""
    return lax.split(array, [1] * count, axis=array.ndim - 1) if count > 1 else [array]


def _beside_sums(scale, n, rows):
    """f32[n, LANES, 1], alike in all lanes -> [n, rows], each value where its lane's sums are."""
    wide = lax.broadcast_in_dim(scale.reshape(n, LANES), (n, rows // (2 * LANES), LANES, 2), (0, 2))
    return wide.reshape(n, rows)


def raised(decoder: Decoder, sums: jax.Array) -> jax.Array:
    """Finished sums of `multiply` at their true size."""
    return sums * 2.0 ** (decoder.lowered - decoder.lift) if decoder.lowered else sums
