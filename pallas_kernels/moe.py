"""Mixture of experts: router and routed experts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.choose_beside_pallas import choose_beside_pallas
from pallas_kernels.impl import MOST_ROWS, Impl, require_few_rows, require_impl
from pallas_kernels.linear import linear
from pallas_kernels.moe_grouped_pallas import moe_grouped_pallas
from pallas_kernels.moe_groups import experts_health
from pallas_kernels.moe_mxfp4_pallas import moe_mxfp4_pallas
from pallas_kernels.moe_reference import choose_reference, moe_reference
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.route_pallas import top_k_pallas


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
    if impl != "reference":
        require_few_rows("route", x.shape[0])
    logits = linear(x, weight, out_dtype=jnp.float32, impl=impl)
    options: dict[str, Any] = {"scaling": scaling, "renormalize": renormalize, "impl": impl}
    return choose(logits, bias, top_k=top_k, **options)


def choose(
    logits: jax.Array,  # f32[W, E]
    bias: jax.Array,  # f32[E]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """The second half of `route`, from its products x @ weight.T on."""
    require_impl("choose", impl)
    _require_experts(top_k, logits)
    run = choose_reference
    if impl != "reference":
        run = functools.partial(top_k_pallas, interpret=impl == "interpret")
    return run(logits, bias, top_k=top_k, scaling=scaling, renormalize=renormalize)


def choose_beside(
    logits: jax.Array,  # f32[W, E]
    bias: jax.Array,  # f32[E]
    x: jax.Array,  # [W, K]
    weight: jax.Array,  # [N, K]
    rows: jax.Array,  # i32[B]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`choose`, and beside it f32[W, N] = `linear(x, weight)` of something else.

    Up to 64 rows are one launch; with more only the choice is a kernel, the rest XLA's. The W rows
    are those of B requests, of which the first rows[b] are real. The others choose no expert: -1,
    of weight 0, so that no expert is read for them. Raises ValueError when shapes do not fit
    together, and what `choose` raises.
    """
    require_impl("choose_beside", impl)
    _require_experts(top_k, logits)
    if (
        logits.shape[0] != x.shape[0]
        or logits.shape[0] % rows.size
        or x.shape[1] != weight.shape[1]
    ):
        raise ValueError(
            "choose_beside takes logits[W,E], x[W,K], weight[N,K] and rows[B] with B a divisor of "
            f"W, got {logits.shape}, {x.shape}, {weight.shape} and {rows.shape}"
        )
    options: dict[str, Any] = {"scaling": scaling, "renormalize": renormalize}
    if impl == "reference" or logits.shape[0] > MOST_ROWS:
        experts, weights = choose(logits, bias, top_k=top_k, impl=impl, **options)
        row = jnp.arange(logits.shape[0] // rows.size, dtype=jnp.int32)
        real = (row[None, :] < rows[:, None]).reshape(-1, 1)
        experts, weights = jnp.where(real, experts, -1), jnp.where(real, weights, 0.0)
        return experts, weights, linear(x, weight, out_dtype=jnp.float32, impl="reference")
    return choose_beside_pallas(
        logits, bias, x, weight, rows, top_k=top_k, interpret=impl == "interpret", **options
    )


def _require_experts(top_k: int, logits: jax.Array) -> None:
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"top_k {top_k} lies outside [1, {logits.shape[1]} experts]")


def moe(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank | DenseBank,
    *,
    activation: Activation,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """Return f32[W, Z], the sum over a row's experts of weight * w2 act(w1 z, w3 z), and health.

    health u32[]: BIT_EXPERT if an id lies outside [-1, E). Ids outside [0, E) are skipped: -1 is no
    expert. Deterministic: a row's terms are added in one order, whatever its company. A NaN row
    stays alone. The bank is decoded one expert at a time. Raises NotImplementedError when a kernel
    is asked for a dense bank.
    """
    if isinstance(bank, Mxfp4Bank):
        return moe_mxfp4(z, experts, weights, bank, activation=activation, impl=impl)
    require_impl("moe", impl, ("reference",))
    return _reference(z, experts, weights, bank, activation)


def moe_mxfp4(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """`moe` over an MXFP4 bank.

    Up to 64 rows the kernels read each chosen expert once for all its rows; with more they sort the
    rows by expert first. The experts of a row are distinct, as `route` chooses them. In bf16 the
    kernels take magnitudes of z from 2^31 on for infinite, and terms below 2^-96 lose bits.
    """
    require_impl("moe_mxfp4", impl)
    if impl == "reference":
        return _reference(z, experts, weights, bank, activation)
    run = moe_mxfp4_pallas if z.shape[0] <= MOST_ROWS else moe_grouped_pallas
    return run(z, experts, weights, bank, activation=activation, interpret=impl == "interpret")


def _reference(z, experts, weights, bank, activation):
    out = moe_reference(z, experts, weights, bank, activation=activation)
    return out, experts_health(experts, bank.w13.shape[0])
