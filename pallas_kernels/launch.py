"""The only door to the Pallas backend.

JAX deprecates the Triton backend of Pallas, and it is the one that runs on ROCm: everything that
touches it passes through this module, so that another backend means another version of this file.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

load = backend.load
store = backend.store
inline_asm = backend.elementwise_inline_asm
barrier = backend.debug_barrier  # among the threads of a program; not in interpret mode


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    interpret: bool,
    num_warps: int = 4,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Launch `kernel(*operand_refs, *output_refs)` once over `grid`.

    Every ref is a whole array: kernels slice with `pl.ds`, because blocked operands are copied
    whole at each grid step in interpret mode. `aliases` maps operand to output positions that
    share memory. `interpret` runs the kernel as plain JAX, program by program, in grid order.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
        compiler_params=backend.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )(*operands)


def by_platform(
    *operands: Any,
    cuda: Callable[..., Any],
    portable: Callable[..., Any],
    interpret: bool,
) -> Any:
    """Run `cuda` when lowered for NVIDIA, else `portable`, which interpretation runs too."""
    if interpret:
        return portable(*operands)
    return lax.platform_dependent(*operands, cuda=cuda, default=portable)


def mesh(*indices: Any) -> tuple[Any, ...]:
    """Index one block of a ref: scalars and 1-D index arrays, each array an axis of the block.

    `ref.at[mesh(expert, rows, columns)]` is the block [rows, columns] of one expert.
    """
    axes = [index for index in indices if getattr(index, "ndim", 0)]
    shape = tuple(axis.size for axis in axes)
    spread = []
    for index in indices:
        if not getattr(index, "ndim", 0):
            spread.append(index)
            continue
        place = len([axis for axis in spread if getattr(axis, "ndim", 0)])
        spread.append(lax.broadcast_in_dim(index, shape, (place,)))
    return tuple(spread)


def fetch_add(ref: Any, index: Any, value: Any, *, interpret: bool) -> Any:
    """Add to one i32 word, atomically, acquiring and releasing; return what it held before.

    Interpretation runs one program after another, so plain reading and writing is the same there.
    """
    if not interpret:
        return backend.atomic_add(ref, (index,), value)
    old = ref[index]
    ref[index] = old + value
    return old


def fetch_or(ref: Any, index: Any, value: Any, *, interpret: bool) -> Any:
    """Set bits of one i32 word, atomically, acquiring and releasing; return what it held before."""
    if not interpret:
        return backend.atomic_or(ref, (index,), value)
    old = ref[index]
    ref[index] = old | value
    return old


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """x * y + z, all f32 of one shape, in one instruction of NVIDIA: XLA does not fuse them."""
    [result] = inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[x, y, z],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(z.shape, z.dtype)],
    )
    return result


def pause(value: Any) -> Any:
    """Return an i32 scalar after some 200 ns, on NVIDIA GPUs."""
    lanes = jnp.broadcast_to(value, (32,))  # the assembly takes no scalar
    [lanes] = inline_asm(
        "nanosleep.u32 200; mov.b32 $0, $1;",
        args=[lanes],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(lanes.shape, lanes.dtype)],
    )
    return jnp.max(lanes)
