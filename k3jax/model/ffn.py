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
    linear,
    moe,
    route,
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

    def __call__(self, x: jax.Array, tap: Tap = silent) -> tuple[jax.Array, jax.Array]:
        """x [W, D] -> (out [W, D], health u32[])."""
        impl = few_rows(self.impl, x)
        inner = linear(x, self.gate_up[...], activation=self.activation, impl=impl)
        out = psum(linear(inner, self.down[...], out_dtype=jnp.float32, impl=impl))
        return out.astype(x.dtype), jnp.uint32(0)


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

    def __call__(self, x: jax.Array, tap: Tap = silent) -> tuple[jax.Array, jax.Array]:
        """x [W, D] -> (out [W, D], health u32[])."""
        impl = few_rows(self.impl, x)
        experts, weights = route(
            x,
            self.router[...],
            self.bias[...],
            top_k=self.top_k,
            scaling=self.scaling,
            renormalize=self.renormalize,
            impl=impl,
        )
        latent = x if self.down is None else linear(x, self.down[...], impl=impl)
        routed = moe(latent, experts, weights, self.bank(), activation=self.activation, impl=impl)
        shared = self.shared(x)
        routed, shared, health = reduce_once(routed, shared, experts, merge=self.up is None)
        tap("router_experts", experts)
        tap("router_weights", weights)
        tap("experts_sum", routed)
        if self.up is None:
            return routed.astype(x.dtype), health
        norm = None if self.latent_norm is None else self.latent_norm[...]
        out = linear(
            routed.astype(x.dtype),
            self.up[...],
            norm=norm,
            eps=self.eps,
            add=shared,
            impl=impl,
        )
        return out, health

    def bank(self) -> Mxfp4Bank | DenseBank:
        if self.mxfp4:
            return Mxfp4Bank(self.w13[...], self.w13_scale[...], self.w2[...], self.w2_scale[...])
        return DenseBank(self.w13[...], self.w2[...])

    def shared(self, x: jax.Array) -> jax.Array:
        """The shared experts' partial sum, f32[W, D]."""
        impl = few_rows(self.impl, x)
        inner = linear(x, self.shared_gate_up[...], activation=self.activation, impl=impl)
        return linear(inner, self.shared_down[...], out_dtype=jnp.float32, impl=impl)


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
