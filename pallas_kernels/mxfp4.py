"""MXFP4: 4-bit floats (E2M1) with one power-of-two scale (E8M0) per 32 consecutive columns.

In files two columns share a byte, the even one in the low nibble. On the device eight neighboring
columns share a 32-bit word, the first in its lowest nibble, four words make a group, and up to four
groups a block: word t * G + g of a block of G groups holds the columns 8 t to 8 t + 7 of its group
g. So the G neighboring words of one t are what one lane of a warp multiplies (see mxfp4_pallas.py).
The same block of eight rows lies together, row by row, before the eight rows' next block: one load
of a warp reads whole lines of memory.
On NVIDIA's GPUs the bits of a word are spread as PLACES says, so that few operations decode it.
Words are packed and read on the same platform; checkpoints hold the bytes of files.
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
LANES = GROUP // WORD  # words of a group
ROWS = 8  # whose blocks lie together: what one load of a warp takes
_SHIFTS = np.arange(0, 4 * WORD, 4, dtype=np.uint32)  # place of each column in a word
# Where the bits of a word's codes lie on NVIDIA's GPUs, column by column, the sign last. KEPT are
# the sign and magnitude of a pair of bfloat16. The first two columns lie there as they are, the
# next two after a shift up by 3, the third two after a rotation down by TURN; what the rotation
# puts in the places of GATHERED is the last two, and a multiplication by GATHER takes it there.
PLACES = (
    (6, 7, 8, 15), (22, 23, 24, 31), (3, 4, 5, 12), (19, 20, 21, 28),
    (16, 17, 18, 25), (0, 1, 2, 9), (14, 10, 11, 13), (30, 26, 27, 29),
)  # fmt: skip
KEPT = 0x81C081C0
TURN = 10
GATHERED = 0x001B001B
GATHER = 1 << 2 | 1 << 7 | 1 << 12


def block_groups(columns: int) -> int:
    """Groups of a block in a row of `columns`: the largest power of two up to 4 that fits."""
    return math.gcd(columns // GROUP, LANES)


def pack_words(packed: jax.Array | np.ndarray) -> jax.Array:
    """Join the codes of a row into words: u8[..., K/2] -> u32[..., K/8]."""
    packed = jnp.asarray(packed)
    lead, columns = packed.shape[:-1], packed.shape[-1] * 2
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint32)
    codes = codes.reshape(*lead, -1, block_groups(columns), LANES, WORD)
    shifts = jnp.asarray(_SHIFTS).reshape(*[1] * (codes.ndim - 1), WORD)
    words = jnp.sum(codes << shifts, axis=-1, dtype=jnp.uint32)
    words = jnp.swapaxes(words, -1, -2).reshape(*lead, columns // WORD)
    return lax.platform_dependent(_by_block(words, inverse=False), cuda=spread, default=_same)


def spread(words: jax.Array) -> jax.Array:
    """Words of codes one after the other, u32[...], as NVIDIA's GPUs want them."""
    return _move_bits(words, inverse=False)


def gather(words: jax.Array) -> jax.Array:
    """Undo `spread`."""
    return _move_bits(words, inverse=True)


def in_order(words: jax.Array) -> jax.Array:
    """Words as `pack_words` gives them on this platform, their codes one after the other."""
    return lax.platform_dependent(words, cuda=gather, default=_same)


def _same(words: jax.Array) -> jax.Array:
    return words


def _move_bits(words: jax.Array, *, inverse: bool) -> jax.Array:
    """Take bit 4 c + b of each word to PLACES[c][b], or back: all that move alike at once."""
    moved: dict[int, int] = {}
    for column, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            source = 4 * column + bit
            distance = source - place if inverse else place - source
            moved[distance] = moved.get(distance, 0) | 1 << (place if inverse else source)
    out = jnp.zeros_like(words)
    for distance, mask in moved.items():
        part = words & jnp.uint32(mask)
        out |= part << distance if distance >= 0 else part >> -distance
    return out


def _by_block(words: jax.Array, *, inverse: bool) -> jax.Array:
    """Put the blocks of eight rows one after the other, or back: u32[..., N, K/8]."""
    if words.ndim < 2:
        return words
    rows, width = words.shape[-2:]
    together = math.gcd(rows, ROWS)
    block = LANES * block_groups(width * WORD)
    tiles = (rows // together, together, width // block, block)
    if inverse:
        tiles = (tiles[0], tiles[2], tiles[1], tiles[3])
    return jnp.swapaxes(words.reshape(*words.shape[:-2], *tiles), -2, -3).reshape(words.shape)


def _codes(words: jax.Array) -> jax.Array:
    """Undo `pack_words`: u32[..., K/8] -> codes u32[..., K]."""
    words = _by_block(in_order(words), inverse=True)
    lead, columns = words.shape[:-1], words.shape[-1] * WORD
    words = words.reshape(*lead, -1, LANES, block_groups(columns), 1)
    codes = words >> jnp.asarray(_SHIFTS).reshape(*[1] * (words.ndim - 1), WORD) & 15
    return jnp.swapaxes(codes, -2, -3).reshape(*lead, columns)


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
