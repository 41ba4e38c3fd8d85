"""The two token mixers, up to and including o_proj: Kimi Delta Attention and latent attention."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache import MlaPages, write_latents
from k3jax.config import K3Config
from k3jax.model.inputs import StepPlan, Tap, few_rows, silent
from k3jax.model.internals import kda_internals
from k3jax.parallel import psum
from pallas_kernels import (
    Impl,
    KdaCache,
    KdaRows,
    KdaWeights,
    kda_decode,
    kda_prefill,
    linear,
    mla_decode,
    mla_prefill,
    rms_norm,
)

LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


def weight(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> nnx.Param:
    """A parameter of one rank's shape; only ever made under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


def split(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """Cut the last axis into parts of these widths."""
    return jnp.split(x, list(accumulate(widths))[:-1], axis=-1)


def output_projection(x: jax.Array, o_proj: jax.Array, impl: Impl) -> jax.Array:
    """x [W, HV] times o_proj [D, HV], summed over the ranks in float32; [W, D] in x's dtype."""
    out = linear(x, o_proj, out_dtype=jnp.float32, impl=few_rows(impl, x))
    return psum(out).astype(x.dtype)


class Kda(nnx.Module):
    """Kimi Delta Attention: gated delta rule with a decay per key channel."""

    def __init__(self, config: K3Config, tp: int, impl: Impl):
        kda = config.kda
        hidden, dim, heads = config.hidden_size, kda.head_dim, kda.num_heads // tp
        self.heads, self.dim, self.impl = heads, dim, impl
        self.lower_bound, self.eps = kda.gate_lower_bound, config.rms_norm_eps
        gate = heads * dim if kda.full_rank_gate else dim
        self.widths = (3 * heads * dim, gate, dim, heads)  # q|k|v, gate, decay rank, beta
        self.in_proj = weight(sum(self.widths), hidden)
        self.f_b = weight(heads * dim, dim)
        self.g_b = None if kda.full_rank_gate else weight(heads * dim, dim)
        self.conv = weight(3 * heads * dim, kda.conv_width, dtype=jnp.float32)
        self.a_log = weight(heads, dtype=jnp.float32)
        self.dt_bias = weight(heads * dim, dtype=jnp.float32)
        self.o_norm = weight(dim, dtype=jnp.float32)
        self.o_proj = weight(hidden, heads * dim)

    def __call__(
        self, x: jax.Array, cache: KdaCache, plan: StepPlan, tap: Tap = silent
    ) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
        """x [W, D] -> (out [W, D], cache, non-finite flags bool[B], health u32[])."""
        rows, weights = self.project(x, plan), self.weights()
        bound = self.lower_bound
        if tap is not silent:
            internals = kda_internals(rows, weights, cache, plan, lower_bound=bound)
            for name, part in internals.items():
                tap(name, part, sharded=1)
        options: dict[str, Any] = {"lower_bound": bound, "norm_eps": self.eps, "impl": self.impl}
        if plan.kind == "decode":
            mixed, cache, flags, health = kda_decode(
                rows, weights, cache, plan.slots, plan.accepted, **options
            )
        else:
            mixed, cache, flags, health = kda_prefill(
                rows,
                weights,
                cache,
                plan.slots,
                plan.accepted,
                plan.fresh,
                lengths=plan.rows,
                **options,
            )
        mixed = mixed.reshape(x.shape[0], -1)
        tap("kda_gated", mixed, sharded=1)
        return output_projection(mixed, self.o_proj[...], self.impl), cache, flags, health

    def project(self, x: jax.Array, plan: StepPlan) -> KdaRows:
        """All projections of the rows x [W, D]."""
        impl = few_rows(self.impl, x)
        qkv, gate, decay, beta = split(linear(x, self.in_proj[...], impl=impl), self.widths)
        decay = linear(decay, self.f_b[...], impl=impl)
        if self.g_b is not None:
            gate = linear(gate, self.g_b[...], impl=impl)
        shape = plan.tokens.shape
        return KdaRows(*(part.reshape(*shape, -1) for part in (qkv, decay, beta, gate)))

    def weights(self) -> KdaWeights:
        return KdaWeights(self.conv[...], self.a_log[...], self.dt_bias[...], self.o_norm[...])


class Mla(nnx.Module):
    """Multi-head latent attention without rotation, always in its absorbed form."""

    def __init__(self, config: K3Config, tp: int, impl: Impl):
        mla, hidden = config.mla, config.hidden_size
        heads = mla.num_heads // tp
        nope, rope, latent = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
        self.heads, self.nope, self.latent, self.impl = heads, nope, latent, impl
        self.scale = (nope + rope) ** -0.5
        self.output_gate = mla.output_gate
        query = mla.q_lora_rank or heads * (nope + rope)
        gate = heads * mla.v_head_dim if mla.output_gate else 0
        self.widths = (query, latent + rope, gate)
        self.in_proj = weight(sum(self.widths), hidden)
        low_rank = mla.q_lora_rank is not None
        self.q_a_norm = weight(query) if low_rank else None
        self.q_b = weight(heads * (nope + rope), query) if low_rank else None
        self.kv_norm = weight(latent)
        self.w_uk = weight(heads, nope, latent)
        self.w_uv = weight(heads, mla.v_head_dim, latent)
        self.o_proj = weight(hidden, heads * mla.v_head_dim)

    def __call__(
        self, x: jax.Array, cache: MlaPages, plan: StepPlan, tap: Tap = silent
    ) -> tuple[jax.Array, MlaPages, jax.Array, jax.Array]:
        """x [W, D] -> (out [W, D], cache, non-finite flags bool[B], health u32[])."""
        projected = linear(x, self.in_proj[...], impl=few_rows(self.impl, x))
        query, latents, gate = split(projected, self.widths)
        latents = self.normalize(latents)
        cache = write_latents(cache, latents, plan.write_pages, plan.write_offsets)
        query = self.absorb(query).reshape(*plan.tokens.shape, self.heads, -1)
        options: dict[str, Any] = {"latent": self.latent, "scale": self.scale, "impl": self.impl}
        if plan.kind == "decode":
            mixed, flags, health = mla_decode(
                query,
                cache.latents,
                plan.page_table,
                plan.starts + plan.rows,
                **options,
            )
        else:
            mixed, flags, health = mla_prefill(
                query,
                cache.latents,
                plan.page_table,
                plan.starts,
                plan.rows,
                **options,
            )
        mixed = self.values(mixed.reshape(x.shape[0], self.heads, -1), gate)
        tap("mla_latents", latents)
        tap("mla_gated", mixed, sharded=1)
        return output_projection(mixed, self.o_proj[...], self.impl), cache, flags, health

    def normalize(self, latents: jax.Array) -> jax.Array:
        """[W, L+R] as projected -> as cached: the latent normalized, the rope part raw."""
        latent, rope = split(latents, (self.latent, latents.shape[-1] - self.latent))
        return jnp.concatenate([rms_norm(latent, self.kv_norm[...], eps=LATENT_EPS), rope], axis=-1)

    def absorb(self, query: jax.Array) -> jax.Array:
        """[W, q_lora or H*(nope+R)] -> queries against the latents [W, H, L+R]."""
        if self.q_b is not None and self.q_a_norm is not None:
            impl = few_rows(self.impl, query)
            query = linear(query, self.q_b[...], norm=self.q_a_norm[...], eps=LATENT_EPS, impl=impl)
        query = query.reshape(query.shape[0], self.heads, -1)
        nope, rope = split(query, (self.nope, query.shape[-1] - self.nope))
        absorbed = per_head("whn,hnl->whl", nope, self.w_uk[...], query.dtype)
        return jnp.concatenate([absorbed, rope], axis=-1)

    def values(self, mixed: jax.Array, gate: jax.Array) -> jax.Array:
        """Attention over latents [W, H, L] -> gated heads [W, H*V], o_proj's input."""
        heads = per_head("whl,hvl->whv", mixed, self.w_uv[...], jnp.float32)
        heads = heads.reshape(mixed.shape[0], -1)
        if self.output_gate:
            heads *= jax.nn.sigmoid(gate.astype(jnp.float32))
        return heads.astype(gate.dtype)


def per_head(
    equation: str, x: jax.Array, weights: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Product of x and weights upcast to x's dtype, batched over heads, accumulated in float32."""
    return jnp.einsum(
        equation,
        x,
        weights.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )
