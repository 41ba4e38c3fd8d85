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
    Projection,
    Unnormed,
    kda_decode,
    kda_prefill,
    linear,
    linears,
    mla_absorb,
    mla_decode,
    mla_prefill,
    mla_values,
    rms_norm,
)

LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


def weight(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> nnx.Param:
    """A parameter of one rank's shape; only ever made under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


def split(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """Cut the last axis into parts of these widths."""
    return jnp.split(x, list(accumulate(widths))[:-1], axis=-1)


def output_projection(
    x: jax.Array | Unnormed, o_proj: jax.Array, impl: Impl, *, eps: float = 0.0
) -> jax.Array:
    """x [W, HV] times o_proj [D, HV], summed over the ranks; f32[W, D]. eps: of unnormed rows."""
    impl = few_rows(impl, x.rows if isinstance(x, Unnormed) else x)
    return psum(linear(x, o_proj, eps=eps, out_dtype=jnp.float32, impl=impl))


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
        self.conv = weight(kda.conv_width, 3 * heads * dim, dtype=jnp.float32)
        self.a_log = weight(heads, dtype=jnp.float32)
        self.dt_bias = weight(heads * dim, dtype=jnp.float32)
        self.o_norm = weight(dim, dtype=jnp.float32)
        self.o_proj = weight(hidden, heads * dim)

    def __call__(
        self, x: jax.Array, cache: KdaCache, plan: StepPlan, tap: Tap = silent
    ) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
        """x [W, D] -> (out f32[W, D], cache, non-finite flags bool[B], health u32[])."""
        mixed, cache, flags, health = self.mix(self.project(x, plan), cache, plan, tap)
        mixed = jax.tree.map(lambda leaf: leaf.reshape(x.shape[0], *leaf.shape[2:]), mixed)
        tap("kda_gated", mixed, sharded=1)
        out = output_projection(mixed, self.o_proj[...], self.impl, eps=self.eps)
        return out, cache, flags, health

    def mix(
        self, rows: KdaRows, cache: KdaCache, plan: StepPlan, tap: Tap
    ) -> tuple[jax.Array | Unnormed, KdaCache, jax.Array, jax.Array]:
        """The rows through the recurrence: (o_proj's input [B, T, H*V], cache, flags, health)."""
        weights, bound = self.weights(), self.lower_bound
        if tap is not silent:
            internals = kda_internals(rows, weights, cache, plan, lower_bound=bound)
            for name, part in internals.items():
                tap(name, part, sharded=1)
        options: dict[str, Any] = {"lower_bound": bound, "norm_eps": self.eps, "impl": self.impl}
        where = (plan.slots, plan.starts, plan.accepted)
        if plan.kind == "decode":
            # A kernel of o_proj divides by the norm in passing, so that heads are split.
            norm = few_rows(self.impl, plan.tokens.reshape(-1)) == "reference" or tap is not silent
            return kda_decode(rows, weights, cache, *where, norm=norm, **options)
        return kda_prefill(rows, weights, cache, *where, plan.fresh, lengths=plan.rows, **options)

    def project(self, x: jax.Array, plan: StepPlan) -> KdaRows:
        """All projections of the rows x [W, D]."""
        impl = few_rows(self.impl, x)
        projection = Projection(self.in_proj[...], widths=self.widths)
        qkv, gate, decay, beta = linears(x, (projection,), impl=impl)
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
        self.heads, self.latent, self.impl = heads, latent, impl
        self.scale = (nope + rope) ** -0.5
        query = mla.q_lora_rank or heads * (nope + rope)
        gate = (heads * mla.v_head_dim,) if mla.output_gate else ()
        self.widths = (query, latent + rope, *gate)
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
        """x [W, D] -> (out f32[W, D], cache, non-finite flags bool[B], health u32[])."""
        projection = Projection(self.in_proj[...], widths=self.widths)
        query, latents, *gate = linears(x, (projection,), impl=few_rows(self.impl, x))
        latents = self.normalize(latents)
        query = self.absorb(query).reshape(*plan.tokens.shape, self.heads, -1)
        mixed, cache, flags, health = self.attend(query, latents, cache, plan)
        mixed = mla_values(
            mixed.reshape(x.shape[0], self.heads, -1),
            self.w_uv[...],
            gate[0] if gate else None,
            impl=few_rows(self.impl, x),
        )
        tap("mla_latents", latents)
        tap("mla_gated", mixed, sharded=1)
        return output_projection(mixed, self.o_proj[...], self.impl), cache, flags, health

    def attend(
        self, query: jax.Array, latents: jax.Array, cache: MlaPages, plan: StepPlan
    ) -> tuple[jax.Array, MlaPages, jax.Array, jax.Array]:
        """query [B, T, H, L+R] over the cache with the rows' own latents [W, L+R] added.

        Returns (the mixed latents [B, T, H, L], cache, flags, health).
        """
        cache = write_latents(cache, latents, plan.write_pages, plan.write_offsets)
        options: dict[str, Any] = {"latent": self.latent, "scale": self.scale, "impl": self.impl}
        pages, table = cache.latents, plan.page_table
        if plan.kind == "decode":
            lengths = plan.starts + plan.rows
            mixed, flags, health = mla_decode(query, pages, table, lengths, **options)
        else:
            mixed, flags, health = mla_prefill(
                query, pages, table, plan.starts, plan.rows, **options
            )
        return mixed, cache, flags, health

    def normalize(self, latents: jax.Array) -> jax.Array:
        """[W, L+R] as projected -> as cached: the latent normalized, the rope part raw."""
        latent, rope = split(latents, (self.latent, latents.shape[-1] - self.latent))
        return jnp.concatenate([rms_norm(latent, self.kv_norm[...], eps=LATENT_EPS), rope], axis=-1)

    def absorb(self, query: jax.Array) -> jax.Array:
        """[W, q_lora or H*(nope+R)] -> queries against the latents [W, H, L+R]."""
        if self.q_b is not None and self.q_a_norm is not None:
            impl = few_rows(self.impl, query)
            query = linear(query, self.q_b[...], norm=self.q_a_norm[...], eps=LATENT_EPS, impl=impl)
        return mla_absorb(query, self.w_uk[...], impl=few_rows(self.impl, query))
