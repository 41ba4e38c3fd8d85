"""One tensor-parallel mesh: how arrays are split over it and how its ranks talk.

Everything that runs on the mesh is one `jit(shard_map(...))`, also on one device, so there is one
program and one set of shapes: inside it every array is a rank's own part. Two choices follow.

- The axis type is `Auto`. `jax.make_mesh` may default to `Explicit`, which puts shardings into the
  types of all arrays outside the map; there are none that need it, since only whole trees with
  their PartitionSpec cross the boundary.
- `check_vma` is off: a `pallas_call` says nothing about which of its results are equal on all
  ranks, so the check refuses any kernel in the map. What it would have proven, that outputs with an
  empty spec really are equal, is proven by a test that compares them bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "tp"
LOGICAL_AXES: dict[str, str] = {
    "heads": AXIS,  # attention heads, and rows of a projection grouped by head
    "vocab": AXIS,
    "experts_inner": AXIS,
    "shared_inner": AXIS,
    "dense_inner": AXIS,
}


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these logical names (None: not split)."""
    return PartitionSpec(*(None if axis is None else LOGICAL_AXES[axis] for axis in axes))


REPLICATED = PartitionSpec()


def make_mesh(tp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of one axis, "tp", over the first `tp` devices; ValueError if there are fewer."""
    devices = jax.devices() if devices is None else devices
    if not 1 <= tp <= len(devices):
        raise ValueError(
            f"tensor parallelism of {tp} needs that many devices, have {len(devices)}; "
            "JAX_NUM_CPU_DEVICES=N simulates some on a CPU"
        )
    return jax.make_mesh((tp,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:tp])


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree of NamedSharding for a tree of PartitionSpec."""
    return jax.tree.map(
        lambda entry: NamedSharding(mesh, entry),
        specs,
        is_leaf=lambda entry: isinstance(entry, PartitionSpec),
    )


def spmd(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function`, written for one rank's parts, as a function of whole arrays.

    ValueError when it is traced with an array that has no elements. XLA puts constants in the place
    of such operands before it reads the map back in, where it counts on operands that all come from
    one instruction: JAX 0.11.2 dies of a segmentation fault there on any mesh of two devices.
    """

    def run(*parts: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(parts)
        empty = [
            f"{jax.tree_util.keystr(path)} {leaf.shape}" for path, leaf in leaves if not leaf.size
        ]
        if empty:
            raise ValueError(f"arrays without elements cannot enter a mesh: {', '.join(empty)}")
        return function(*parts)

    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_alone = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Trace a model that every rank holds whole: `rank()` is 0, `world()` is 1, nothing is sent."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def rank() -> jax.Array:
    """This rank's number, i32[]; only inside `spmd`."""
    return jnp.int32(0) if _alone.get() else jax.lax.axis_index(AXIS).astype(jnp.int32)


def world() -> int:
    """Number of ranks; only inside `spmd`."""
    return 1 if _alone.get() else jax.lax.axis_size(AXIS)


def psum(x: jax.Array) -> jax.Array:
    """Sum over the ranks; only inside `spmd`."""
    return x if world() == 1 else jax.lax.psum(x, AXIS)


def gather(x: jax.Array, axis: int) -> jax.Array:
    """The ranks' parts concatenated along `axis`; only inside `spmd`."""
    return x if world() == 1 else jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)
