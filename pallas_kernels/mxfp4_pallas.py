"""Decode MXFP4 words in registers, inside a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch

HALF = 0x3F00  # 0.5 in bfloat16: the smallest magnitude above zero


def scale_values(scales: jax.Array) -> jax.Array:
    """2^(scale - 127) of E8M0 bytes in float32; infinity for 255, so no sum of it is finite."""
    # 2^-127 is subnormal: bits of its own.
    bits = jnp.maximum(scales.astype(jnp.int32) << 23, 1 << 22)
    return lax.bitcast_convert_type(bits, jnp.float32)


def decode(words: jax.Array, nibble: int, dtype: jnp.dtype) -> jax.Array:
    """Decode one nibble of each word, without its scale, by integer operations any GPU has.

    words: u32[n, b]. Returns [n, b] in `dtype` (float32 or bfloat16), exactly.
    """
    code = words >> jnp.uint32(4 * nibble)
    magnitude = code & jnp.uint32(7)
    normal = (magnitude << 6) + jnp.uint32(HALF)  # a 2-bit exponent and a mantissa bit
    bits = jnp.where(magnitude > 1, normal, magnitude * jnp.uint32(HALF))
    bits |= (code & jnp.uint32(8)) << 12
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(bits << 16, jnp.float32)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def decode_cuda(words: jax.Array, nibble: int, dtype: jnp.dtype) -> jax.Array:
    """`decode` to bfloat16 on NVIDIA GPUs from compute capability 9.0, two values at a time.

    The code's three magnitude bits, put at the border of exponent and mantissa, are the value times
    2^-126, the subnormal one too: one exact multiplication brings it to size.
    """
    if dtype != jnp.bfloat16:
        return decode(words, nibble, dtype)
    place = 4 * (nibble % 4)
    shift = f"shl.b32 m, h, {6 - place};" if place <= 6 else f"shr.u32 m, h, {place - 6};"
    halves = "0x5410" if nibble < 4 else "0x7632"
    assembly = f"""{{
    .reg .b32 h, m, s;
    prmt.b32 h, $1, $2, {halves};
    {shift}
    and.b32 m, m, 0x01C001C0;
    shl.b32 s, h, {12 - place};
    lop3.b32 m, s, 0x80008000, m, 0xEA;
    mov.b32 s, 0x7E807E80;
    mul.rn.bf16x2 $0, m, s;
    }}"""
    [values] = launch.inline_asm(
        assembly,
        args=[words],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return values
