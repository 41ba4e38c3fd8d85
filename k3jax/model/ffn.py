"""The feed-forward halves of a layer: a dense gated MLP, or routed experts with shared ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import K3Config
from k3jax.model.inputs import Tap, few_rows, silent
from k3jax.model.mixers import weight
from k3jax.parallel import psum, world
from pallas_kernels import (
    BIT_DIVERGED,
    Activation,
    DenseBank,
    Impl,
    Mxfp4Bank,
    Projection,
    choose_beside,
    linear,
    linears,
    moe,
    rms_norm,
)

CHECKSUM_MODULUS = 1 << 15  # the sum over 512 ranks is still exact in float32


def activation_of(config: K3Config) -> Activation:
    if config.activation == "silu":
        return Activation("silu")
    return Activation("situ", config.situ_beta, config.situ_linear_beta)


class Dense(nnx.Module):
    """Gated MLP."""

    def __init__(self, config: K3Config, tp: int, impl: Impl):
        inner = config.dense_inner // tp
        self.activation, self.impl = activation_of(config), impl
        self.gate_up = weight(2 * inner, config.hidden_size)
        self.down = weight(config.hidden_size, inner)

    def __call__(
        self, x: jax.Array, rows: jax.Array, tap: Tap = silent
    ) -> tuple[jax.Array, jax.Array]:
        """x [W, D], rows i32[B] as for `Moe` -> (out f32[W, D], health u32[])."""
        del rows  # the weights are read in any case
        impl = few_rows(self.impl, x)
        inner = linear(x, self.gate_up[...], activation=self.activation, impl=impl)
        out = linear(inner, self.down[...], out_dtype=jnp.float32, impl=impl)
        return psum(out), jnp.uint32(0)


class Moe(nnx.Module):
    """Routed experts, in a narrower latent if the model has one, beside shared experts.

    Every rank holds a slice of each expert's inner width. The experts' partial sum and the shared
    experts' travel in one reduction; the up-projection is replicated, since it follows a norm over
    the whole latent.
    """

    def __init__(self, config: K3Config, tp: int, impl: Impl):
        experts, hidden = config.moe, config.hidden_size
        self.top_k, self.scaling = experts.top_k, experts.scaling
        self.renormalize, self.eps = experts.renormalize, config.rms_norm_eps
        self.activation, self.impl = activation_of(config), impl
        width, inner = experts.latent or hidden, experts.inner // tp
        self.router = weight(experts.num_experts, hidden)
        self.bias = weight(experts.num_experts, dtype=jnp.float32)
        latent = experts.latent is not None
        self.down = weight(width, hidden) if latent else None
        self.latent_norm = weight(width) if latent and experts.latent_norm else None
        self.up = weight(hidden, width) if latent else None
        self.shared_gate_up = weight(2 * experts.shared_inner // tp, hidden)
        self.shared_down = weight(hidden, experts.shared_inner // tp)
        count = experts.num_experts
        self.mxfp4 = experts.mxfp4
        if experts.mxfp4:
            self.w13 = weight(count, 2 * inner, width // 8, dtype=jnp.uint32)
            self.w13_scale = weight(count, 2 * inner, width // 32, dtype=jnp.uint8)
            self.w2 = weight(count, width, inner // 8, dtype=jnp.uint32)
            self.w2_scale = weight(count, width, inner // 32, dtype=jnp.uint8)
        else:
            self.w13 = weight(count, 2 * inner, width)
            self.w2 = weight(count, width, inner)

    def __call__(
        self, x: jax.Array, rows: jax.Array, tap: Tap = silent
    ) -> tuple[jax.Array, jax.Array]:
        """x [W, D] of B requests -> (out f32[W, D], health u32[]).

        Of each request the first rows[b] rows are real, i32[B]; the others read no experts.
        """
        impl = few_rows(self.impl, x)
        logits, *latent, inner = linears(x, self.projections(), impl=impl)
        experts, weights, shared = choose_beside(
            logits,
            self.bias[...],
            inner,
            self.shared_down[...],
            rows,
            top_k=self.top_k,
            scaling=self.scaling,
            renormalize=self.renormalize,
            impl=self.impl,
        )
        routed, health = self.run_experts(latent[0] if latent else x, experts, weights)
        routed, shared, diverged = reduce_once(routed, shared, experts, merge=self.up is None)
        health |= diverged
        tap("router_experts", experts)
        tap("router_weights", weights)
        tap("experts_sum", routed)
        if self.up is None:
            return routed, health
        if self.latent_norm is not None:
            routed = rms_norm(routed, self.latent_norm[...], eps=self.eps)
        out = linear(
            routed.astype(x.dtype),
            self.up[...],
            add=shared,
            out_dtype=jnp.float32,
            impl=impl,
        )
        return out, health

    def run_experts(
        self, z: jax.Array, experts: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sum of each row's experts i32[W, J], f32[W, Z], and the health u32[]."""
        # MXFP4 experts have kernels for any number of rows, others have none.
        impl = self.impl if self.mxfp4 else "reference"
        return moe(z, experts, weights, self.bank(), activation=self.activation, impl=impl)

    def projections(self) -> list[Projection]:
        """What reads the rows: the router, the latent if there is one, the shared experts."""
        return [
            Projection(self.router[...], out_dtype=jnp.float32),
            *([] if self.down is None else [Projection(self.down[...])]),
            Projection(self.shared_gate_up[...], activation=self.activation),
        ]

    def bank(self) -> Mxfp4Bank | DenseBank:
        if self.mxfp4:
            return Mxfp4Bank(self.w13[...], self.w13_scale[...], self.w2[...], self.w2_scale[...])
        return DenseBank(self.w13[...], self.w2[...])


def reduce_once(
    routed: jax.Array, shared: jax.Array, experts: jax.Array, *, merge: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum both partial sums, f32[W, Z] and f32[W, D], over the ranks in one reduction.

    With `merge` they are of one width and only their sum is wanted (first result; the second is
    unused). A checksum of each row's chosen experts travels along: the router is replicated, and
    ranks that chose differently would go on with different texts. Returns health u32[].
    """
    parts = [routed + shared] if merge else [routed, shared]
    if world() == 1:
        return parts[0], parts[-1], jnp.uint32(0)
    own = checksum(experts)
    total = psum(jnp.concatenate([*parts, own[:, None]], axis=-1))
    same = jnp.all(total[:, -1] == own * world())
    health = jnp.where(same, jnp.uint32(0), jnp.uint32(BIT_DIVERGED))
    width = routed.shape[-1]
    return total[:, :width], total[:, width:-1], health


def checksum(experts: jax.Array) -> jax.Array:
    """A whole number below CHECKSUM_MODULUS for each row of expert ids i32[W, J]; f32[W]."""
    place = 2 * jnp.arange(experts.shape[1], dtype=jnp.int32) + 1
    mixed = jnp.sum((experts + 1) * (place * 2654435 % CHECKSUM_MODULUS)[None, :], axis=-1)
    return (mixed % CHECKSUM_MODULUS).astype(jnp.float32)
