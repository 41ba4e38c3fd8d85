"""Single ops against what an independent implementation recorded inside a tiny Kimi-K3.

The inputs of each op are the recorded ones, so that an error stays in its op.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from pallas_kernels import (
    Activation,
    KdaCache,
    KdaPending,
    KdaRows,
    KdaWeights,
    Mxfp4Bank,
    attn_res,
    attn_res_mix,
    kda_prefill,
    linear,
    mla_prefill,
    moe,
    rms_norm,
    route,
)
from pallas_kernels.mxfp4 import pack_words

from .oracles import sigmoid

IMPLS = ["reference"]
HEADS, DIM, LATENT, ROPE, EXPERTS, EPS = 8, 32, 32, 16, 16, 1e-5
SITU = Activation("situ", beta=4.0, linear_beta=25.0)


@pytest.fixture(scope="module")
def weights(golden):
    """Every text tensor by its name in the file without the prefix."""
    tensors = {}
    for path in sorted((golden / "k3-tiny-a").glob("*.safetensors")):
        with safe_open(path, framework="flax") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith("language_model."):
                    short = name.removeprefix("language_model.").removeprefix("model.")
                    tensors[short.removeprefix("layers.")] = file.get_tensor(name)
    return tensors


@pytest.fixture(scope="module")
def recorded(golden):
    with np.load(golden / "k3-tiny-a" / "golden.npz") as file:
        return {name.removeprefix("seq1."): file[name] for name in file if "seq1." in name}


def assert_recorded(actual, expected):
    actual = np.asarray(actual, np.float64)
    assert np.abs(actual - expected).max() <= 3e-5 * np.abs(expected).max()
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_attn_res(weights, recorded, impl):
    blocks = jnp.asarray(np.moveaxis(recorded["block_residual"], 1, 0))
    mixer = [weights[f"4.self_attention_res_{part}.weight"] for part in ("norm", "proj")]
    part = jnp.asarray(recorded["L3.out"])
    mix = attn_res_mix(blocks, jnp.int32(2), part, mixer[0], mixer[1][0], eps=EPS)
    assert_recorded(mix, recorded["L4.attn_res"])
    normed, _ = attn_res(
        blocks,
        jnp.int32(2),
        part,
        weights["4.mlp_res_norm.weight"],
        weights["4.mlp_res_proj.weight"][0],
        weights["4.post_attention_layernorm.weight"],
        delta=jnp.asarray(recorded["L4.attn_out"]),
        eps=EPS,
        impl=impl,
    )
    assert_recorded(normed, recorded["L4.mlp_in"])


@pytest.mark.parametrize("impl", IMPLS)
def test_kda(weights, recorded, impl):
    def matrix(name):
        return weights[f"1.self_attn.{name}.weight"]

    x = jnp.asarray(recorded["L1.attn_in"])
    q, k, v, g, beta = (
        linear(x, matrix(f"{name}_proj"), impl=impl)[None] for name in ("q", "k", "v", "g", "b")
    )
    decay = linear(linear(x, matrix("f_a_proj"), impl=impl), matrix("f_b_proj"), impl=impl)[None]
    conv = jnp.concatenate([matrix(f"{name}_conv1d")[:, 0] for name in ("q", "k", "v")])
    small = KdaWeights(
        conv.T.astype(jnp.float32),
        weights["1.self_attn.A_log"][:HEADS],
        weights["1.self_attn.dt_bias"],
        matrix("o_norm"),
    )
    channels = 3 * HEADS * DIM
    pending = KdaPending(*[jnp.zeros((2, 4, HEADS, DIM))] * 3)
    cache = KdaCache(jnp.zeros((2, 4, channels)), jnp.zeros((2, HEADS, DIM, DIM)), pending)
    one = jnp.ones(1, jnp.int32)
    out, cache, _, _ = kda_prefill(
        KdaRows(jnp.concatenate([q, k, v], axis=2), decay, beta, g),
        small,
        cache,
        one,
        one * 0,
        one * 0,
        jnp.ones(1, bool),
        lengths=one * len(x),
        lower_bound=-5.0,
        norm_eps=EPS,
        impl=impl,
    )
    assert_recorded(out[0], recorded["L1.kda_gated_norm_out"].reshape(len(x), -1))
    window = cache.conv[1, np.arange(len(x) - 3, len(x)) % 4]
    assert_recorded(window, recorded["L1.conv_state_mlx"])
    assert_recorded(cache.state[1], recorded["L1.ssm_state_mlx"])
    assert_recorded(linear(out[0], matrix("o_proj"), impl=impl), recorded["L1.attn_out"])


@pytest.mark.parametrize("impl", IMPLS)
def test_moe(weights, recorded, impl):
    def matrix(name):
        return weights[f"1.block_sparse_moe.{name}.weight"]

    def stacked(name, part):
        return jnp.stack(
            [
                weights[f"1.block_sparse_moe.experts.{e}.{name}.weight_{part}"]
                for e in range(EXPERTS)
            ]
        )

    x = jnp.asarray(recorded["L1.mlp_in"])
    bias = weights["1.block_sparse_moe.gate.e_score_correction_bias"].astype(jnp.float32)
    experts, shares = route(
        x, matrix("gate"), bias, top_k=4, scaling=1.0, renormalize=True, impl=impl
    )
    ascending = np.argsort(experts, axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(experts), ascending, 1), recorded["L1.moe_idx"]
    )
    assert_recorded(np.take_along_axis(np.asarray(shares), ascending, 1), recorded["L1.moe_w"])
    both = [
        jnp.concatenate([stacked("w1", part), stacked("w3", part)], axis=1)
        for part in ("packed", "scale")
    ]
    bank = Mxfp4Bank(
        pack_words(both[0]), both[1], pack_words(stacked("w2", "packed")), stacked("w2", "scale")
    )
    z = linear(x, matrix("routed_expert_down_proj"), impl=impl)
    latent, health = moe(z, experts, shares, bank, activation=SITU, impl=impl)
    assert health == 0
    assert_recorded(latent, recorded["L1.moe_latent_sum"])
    halves = [matrix(f"shared_experts.{name}_proj") for name in ("gate", "up")]
    shared = linear(x, jnp.concatenate(halves), activation=SITU, impl=impl)
    shared = linear(shared, matrix("shared_experts.down_proj"), impl=impl)
    up, norm = matrix("routed_expert_up_proj"), matrix("routed_expert_norm")
    out = linear(latent, up, norm=norm, eps=EPS, add=shared, impl=impl)
    assert_recorded(out, recorded["L1.mlp_out"])


@pytest.mark.parametrize("impl", IMPLS)
def test_mla(weights, recorded, impl):
    def matrix(name):
        return weights[f"3.self_attn.{name}.weight"]

    x = jnp.asarray(recorded["L3.attn_in"])
    rows = len(x)
    query = linear(x, matrix("q_a_proj"), impl=impl)
    query = linear(query, matrix("q_b_proj"), norm=matrix("q_a_layernorm"), eps=1e-6, impl=impl)
    query = np.asarray(query, np.float64).reshape(rows, HEADS, -1)
    cached = linear(x, matrix("kv_a_proj_with_mqa"), impl=impl)
    latent, rope = cached[:, :LATENT], cached[:, LATENT:]
    latent = rms_norm(latent, matrix("kv_a_layernorm"), eps=1e-6)
    assert_recorded(latent, recorded["L3.kv_latent_mlx"])
    assert_recorded(rope, recorded["L3.k_rope_mlx"])
    kv_b = np.asarray(matrix("kv_b_proj"), np.float64).reshape(HEADS, -1, LATENT)
    absorbed = np.einsum("thd,hdl->thl", query[..., :-ROPE], kv_b[:, :-DIM])
    absorbed = np.concatenate([absorbed, query[..., -ROPE:]], axis=-1)
    cached = jnp.concatenate([latent, rope], axis=1)
    page = 8
    used = -(-rows // page)
    pages = jnp.zeros((used + 1, page, LATENT + ROPE))
    pages = pages.at[1:].set(jnp.pad(cached, ((0, -rows % page), (0, 0))).reshape(used, page, -1))
    out, _, _ = mla_prefill(
        jnp.asarray(absorbed, jnp.float32)[None],
        pages,
        1 + jnp.arange(used, dtype=jnp.int32)[None],
        jnp.zeros(1, jnp.int32),
        jnp.full(1, rows, jnp.int32),
        latent=LATENT,
        scale=query.shape[-1] ** -0.5,
        impl=impl,
    )
    values = np.einsum("thl,hvl->thv", np.asarray(out[0], np.float64), kv_b[:, -DIM:])
    gate = np.asarray(linear(x, matrix("g_proj"), impl=impl), np.float64)
    gated = jnp.asarray(values.reshape(rows, -1) * sigmoid(gate), jnp.float32)
    assert_recorded(linear(gated, matrix("o_proj"), impl=impl), recorded["L3.attn_out"])
