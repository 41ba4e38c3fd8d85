"""MXFP4: 4-bit floats (E2M1) with one power-of-two scale (E8M0) per 32 consecutive columns.

In files two columns share a byte, the even one in the low nibble. On the device eight columns
share a 32-bit word, and not eight neighbors: in a block of 8 b columns, b a power of two up to 32,
word j holds columns j, b + j, .. 7b + j, the first in its lowest nibble. So nibble p of b
neighboring words is b neighboring columns of one scale: a kernel decodes and multiplies them as
they stand.
Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign; a value is code * 2^(scale - 127).
Scale 255 is NaN by the specification (OCP Microscaling Formats 1.0); the loader refuses it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUP = 32  # columns per scale
WORD = 8  # columns per 32-bit word


def block_words(words: int) -> int:
    """Words of a block, b, in a row of `words`: the largest power of two up to 32 that fits."""
    return math.gcd(words, GROUP)


def pack_words(packed: jax.Array | np.ndarray) -> jax.Array:
    """Join the codes of a row into words: u8[..., K/2] -> u32[..., K/8]."""
    packed = jnp.asarray(packed)
    lead, words = packed.shape[:-1], packed.shape[-1] * 2 // WORD
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint32)
    codes = codes.reshape(*lead, -1, WORD, block_words(words))
    return jnp.sum(codes << _shifts(codes.ndim), axis=-2).reshape(*lead, words)


def unpack_words(words: jax.Array | np.ndarray) -> jax.Array:
    """Undo `pack_words`: u32[..., K/8] -> u8[..., K/2]."""
    codes = _codes(jnp.asarray(words)).astype(jnp.uint8)
    codes = codes.reshape(*codes.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def _shifts(rank: int) -> jax.Array:
    """Place of each nibble of a word, along the last axis but one."""
    return jnp.arange(0, 4 * WORD, 4, dtype=jnp.uint32).reshape(*[1] * (rank - 2), WORD, 1)


def _codes(words: jax.Array) -> jax.Array:
    """u32[..., K/8] -> codes u32[..., K]."""
    block = block_words(words.shape[-1])
    blocks = words.reshape(*words.shape[:-1], -1, 1, block)
    return ((blocks >> _shifts(blocks.ndim)) & 15).reshape(*words.shape[:-1], -1)


def dequantize(
    words: jax.Array,  # u32[..., K/8]
    scales: jax.Array,  # u8[..., K/32]
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Decode to [..., K], exactly, for scales 0..254.

    dtype: float32 or bfloat16; both hold every value, subnormal ones too, except that magnitudes
    of 2^128 and above become infinite. Scale 255 gives NaN. The bits are put together as integers,
    because the CPU backend flushes subnormal results of float arithmetic to zero.
    """
    if words.shape[-1] * WORD != scales.shape[-1] * GROUP:
        raise ValueError(f"{words.shape[-1]} words of 8 do not fit {scales.shape[-1]} scales of 32")
    codes = _codes(words).reshape(*scales.shape, GROUP)
    bits = _float_bits(codes, scales[..., None].astype(jnp.int32))
    bits = bits.reshape(*scales.shape[:-1], -1)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    raise ValueError(f"dequantize gives float32 or bfloat16, not {jnp.dtype(dtype).name}")


def _float_bits(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """IEEE binary32 bits of code * 2^(scale - 127); only the low nibble of `codes` counts."""
    magnitude = (codes & 7).astype(jnp.int32)
    # Codes 2..7 are a 2-bit exponent and a 1-bit mantissa; code 1 is the only subnormal, 2^-1.
    exponent = scales + (magnitude >> 1) - 1
    mantissa = jnp.where(magnitude > 1, (magnitude & 1) << 22, 0)
    normal = (exponent << 23) | mantissa
    subnormal = ((1 << 23) | mantissa) >> jnp.clip(1 - exponent, 0, 2)
    bits = jnp.where(exponent > 0, normal, subnormal)
    bits = jnp.where(exponent > 254, 0x7F800000, bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scales == 255, 0x7FC00000, bits)
    return bits.astype(jnp.uint32) | ((codes & 8) << 28)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize on the host by the compressed-tensors rule.

    x: finite floats [..., K], K a multiple of 32. Returns (packed u8[..., K/2], scales
    u8[..., K/32]). The scale is floor(log2 amax) - 2, plus 1 when amax's mantissa is 1.75 or more;
    values round to nearest, ties to even, and clamp at 6. Raises ValueError otherwise.
    """
    x = np.asarray(x, np.float32)
    if x.shape[-1] % GROUP or not np.isfinite(x).all():
        raise ValueError(f"quantize takes finite values in groups of {GROUP}, got {x.shape}")
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    fraction, power = np.frexp(np.abs(groups).max(axis=-1))  # amax = fraction * 2^power
    exponent = power - 3 + (fraction >= 0.875)
    scales = np.where(fraction == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
    scaled = np.ldexp(groups.astype(np.float64), 127 - scales.astype(np.int32)[..., None])
    codes = _nearest_code(np.abs(scaled)) | (np.signbit(scaled).astype(np.uint8) << 3)
    codes = codes.reshape(*x.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales


def _nearest_code(magnitude: np.ndarray) -> np.ndarray:
    """Codes 0..7 nearest to `magnitude`, ties to the even code."""
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = np.searchsorted(midpoints, magnitude, side="left")
    tie_up = (below < 7) & (magnitude == midpoints[np.minimum(below, 6)]) & (below % 2 == 1)
    return (below + tie_up).astype(np.uint8)
