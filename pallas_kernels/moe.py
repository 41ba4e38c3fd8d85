"""Mixture of experts: router and routed experts."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.activation import Activation
from pallas_kernels.impl import Impl, require_few_rows, require_impl
from pallas_kernels.moe_mxfp4_pallas import moe_mxfp4_pallas
from pallas_kernels.moe_reference import moe_reference, route_reference
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.route_pallas import route_pallas


def route(
    x: jax.Array,  # [W, D]
    weight: jax.Array,  # [E, D]
    bias: jax.Array,  # f32[E]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """Choose `top_k` experts a row by sigmoid(x @ weight.T) + bias, computed in float32.

    Returns (experts i32[W, top_k] by descending biased score, ties to the lower id; weights
    f32[W, top_k] = scaling * the unbiased scores, divided by their sum + 1e-20 if `renormalize`).
    An expert with a NaN score is chosen only when a row has fewer than top_k others. Raises
    ValueError when top_k exceeds the number of experts, NotImplementedError when the kernel is
    asked for more than 64 rows.
    """
    require_impl("route", impl)
    if not 0 < top_k <= weight.shape[0]:
        raise ValueError(f"top_k {top_k} lies outside [1, {weight.shape[0]} experts]")
    run = route_reference
    if impl != "reference":
        require_few_rows("route", x.shape[0])
        run = functools.partial(route_pallas, interpret=impl == "interpret")
    return run(x, weight, bias, top_k=top_k, scaling=scaling, renormalize=renormalize)


def moe(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank | DenseBank,
    *,
    activation: Activation,
    impl: Impl,
) -> jax.Array:
    """Return f32[W, Z], the sum over a row's experts of weight * w2 act(w1 z, w3 z).

    Deterministic: a row's terms are added in one order, whatever its company. Ids outside [0, E)
    are skipped. A NaN row stays alone. The bank is decoded one expert at a time. Raises
    NotImplementedError when a kernel is asked for a dense bank.
    """
    if isinstance(bank, Mxfp4Bank):
        return moe_mxfp4(z, experts, weights, bank, activation=activation, impl=impl)
    require_impl("moe", impl, ("reference",))
    return moe_reference(z, experts, weights, bank, activation=activation)


def moe_mxfp4(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    impl: Impl,
) -> jax.Array:
    """`moe` over an MXFP4 bank.

    The kernels read each chosen expert once for all its rows. The experts of a row are distinct, as
    `route` chooses them. Raises NotImplementedError when they are asked for more than 64 rows.
    """
    require_impl("moe_mxfp4", impl)
    run = moe_reference
    if impl != "reference":
        require_few_rows("moe_mxfp4", z.shape[0])
        run = functools.partial(moe_mxfp4_pallas, interpret=impl == "interpret")
    return run(z, experts, weights, bank, activation=activation)
