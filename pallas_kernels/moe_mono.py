"""The latent MoE of a decode step, router to weighted sum and shared experts, in one launch.

The decoder uses the separate ops, which are faster on an H200: benchmarks/RESULTS.md says by how
much and why.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.impl import Impl, require_impl
from pallas_kernels.linear_reference import linear_reference
from pallas_kernels.moe_mono_pallas import moe_mono_pallas
from pallas_kernels.moe_mono_tiles import bad_mark, counters, mono_tiles, sizes_of
from pallas_kernels.moe_reference import moe_reference, route_reference
from pallas_kernels.moe_types import Mxfp4Bank
from pallas_kernels.persistent import EPOCH, HEADER, health_of, make_control

MOST_MONO_ROWS = 16
"""Rows that moe_mono's kernel takes; with more, the experts outweigh what one launch saves."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentMoeWeights:
    """A rank's latent MoE up to the reduction; S is the rank's inner width of shared experts."""

    router: jax.Array  # [E, D]
    bias: jax.Array  # f32[E]
    down: jax.Array  # [Z, D]
    shared_gate_up: jax.Array  # [2S, D]
    shared_down: jax.Array  # [D, S]
    bank: Mxfp4Bank


class MoeMonoResult(NamedTuple):
    """What one step's latent MoE gives, before the reduction over ranks."""

    routed: jax.Array  # f32[W, Z]: the weighted sum of the experts
    shared: jax.Array  # f32[W, D]: the shared experts
    experts: jax.Array  # i32[W, J]; -1 in rows that do not live
    weights: jax.Array  # f32[W, J]
    flags: jax.Array  # bool[W]: a live row with a result that is not finite
    health: jax.Array  # u32[]
    control: jax.Array  # i32[words]: for the next launch


def moe_mono_control(x: jax.Array, weights: LatentMoeWeights, *, top_k: int) -> jax.Array:
    """Control words of `moe_mono` for rows of x's shape and dtype, before its first launch.

    x and weights may be ShapeDtypeStructs. Returns i32[words]; one array serves all layers of a
    rank in turn, and no other shape.
    """
    sizes = sizes_of(x, weights, top_k)
    tiles = mono_tiles(sizes, exact=x.dtype == jnp.float32)
    return make_control(counters(sizes, tiles).count)


def moe_mono(
    x: jax.Array,  # [W, D]
    live: jax.Array,  # bool[W]
    weights: LatentMoeWeights,
    control: jax.Array,  # i32[words], donated by who jits: the kernel changes it in place
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    activation: Activation,
    impl: Impl,
) -> MoeMonoResult:
    """Do `route`, the latent down projection, `moe` and the shared experts in one launch.

    The latent and the shared experts' inner features are rounded to x.dtype. Rows that do not live
    choose no expert, and set no flag. BIT_WAIT in the health word says that a wait inside the
    launch gave up: results are then undefined, and so are those of every later launch on the same
    control words. Raises ValueError when control has another shape's size, NotImplementedError
    when the kernel is asked for more than 16 rows.
    """
    require_impl("moe_mono", impl)
    if impl == "reference":
        return _reference(x, live, weights, control, top_k, scaling, renormalize, activation)
    if x.shape[0] > MOST_MONO_ROWS:
        raise NotImplementedError(
            f"moe_mono's kernel takes up to {MOST_MONO_ROWS} rows, not {x.shape[0]}: "
            "use route, linear and moe_mxfp4"
        )
    sizes = sizes_of(x, weights, top_k)
    tiles = mono_tiles(sizes, exact=x.dtype == jnp.float32)
    at = counters(sizes, tiles)
    if control.shape != (HEADER + at.count,):
        raise ValueError(
            f"control has shape {control.shape}; moe_mono_control makes {(HEADER + at.count,)} "
            "for these rows and weights"
        )
    control, routed, shared, experts, chosen = moe_mono_pallas(
        x,
        live.astype(jnp.int32),
        weights,
        control,
        top_k=top_k,
        scaling=scaling,
        renormalize=renormalize,
        activation=activation,
        interpret=impl == "interpret",
        tiles=tiles,
    )
    bad = control[HEADER + at.bad : HEADER + at.bad + x.shape[0]]
    flags = bad == bad_mark(control[EPOCH])
    return MoeMonoResult(routed, shared, experts, chosen, flags, health_of(control), control)


def _reference(x, live, weights, control, top_k, scaling, renormalize, activation):
    experts, chosen = route_reference(
        x, weights.router, weights.bias, top_k=top_k, scaling=scaling, renormalize=renormalize
    )
    experts = jnp.where(live[:, None], experts, -1)
    chosen = jnp.where(live[:, None], chosen, 0.0)

    linear = functools.partial(linear_reference, norm=None, eps=0.0, add=None)
    z = linear(x, weights.down, activation=None, out_dtype=None)
    routed = moe_reference(z, experts, chosen, weights.bank, activation=activation)
    inner = linear(x, weights.shared_gate_up, activation=activation, out_dtype=None)
    shared = linear(inner, weights.shared_down, activation=None, out_dtype=jnp.float32)
    finite = jnp.isfinite(routed).all(axis=1) & jnp.isfinite(shared).all(axis=1)
    flags = live & jnp.logical_not(finite)
    control = control.at[EPOCH].add(1)
    return MoeMonoResult(routed, shared, experts, chosen, flags, health_of(control), control)
