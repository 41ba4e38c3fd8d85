"""Float64 numpy oracles of the ops, written from the equations, and the tolerance table.

Every oracle takes plain numpy arrays (see `wide`) and works row by row and token by token.
"""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.case_inputs import inputs
from pallas_kernels.cases import select

DTYPES = [
    pytest.param(jnp.float32, id="f32"),
    pytest.param(jnp.bfloat16, id="bf16"),
]
# Relative error allowed: a flat part (rounded inputs and outputs), and one per root of the number
# of terms summed in float32.
TOLERANCE = {"float32": (1e-6, 1e-7), "bfloat16": (8e-3, 1e-7)}


def tiny(op):
    """The cases of `op` for CPU tests, as pytest parameters."""
    return [pytest.param(case, id=case.name) for case in select(op, "tiny")]


@cache
def made(case, dtype):
    """The case's random arrays, made once, in one compiled program."""
    return jax.jit(lambda: inputs(case, dtype))()


def assert_close(actual, expected, dtype, terms):
    """Compare in the Frobenius norm and, ten times looser, element by element."""
    actual = np.asarray(actual).astype(np.float64)
    flat, slope = TOLERANCE[jnp.dtype(dtype).name]
    tolerance = flat + slope * terms**0.5
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    size = np.linalg.norm(expected)
    assert np.linalg.norm(actual - expected) <= tolerance * size
    largest = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=10 * tolerance * largest)


def assert_same_bits(actual, expected):
    """Compare trees of arrays bit for bit, NaN included."""
    left, right = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def wide(tree):
    """Numpy copies of a tree's arrays, floats in float64."""

    def convert(leaf):
        leaf = np.asarray(leaf)
        floats = leaf.dtype.kind == "f" or leaf.dtype == ml_dtypes.bfloat16
        return leaf.astype(np.float64) if floats else leaf

    return jax.tree.map(convert, tree)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gated(activation, gate, up):
    if activation.kind == "silu":
        return silu(gate) * up
    beta, bound = activation.beta, activation.linear_beta
    return beta * np.tanh(gate / beta) * sigmoid(gate) * bound * np.tanh(up / bound)


def linear(x, weight, norm, add, *, eps, activation):
    if norm is not None:
        x = rms(x, norm, eps)
    out = x @ weight.T
    if activation is not None:
        out = gated(activation, *np.split(out, 2, axis=1))
    return out if add is None else out + add


def attn_res(blocks, count, part, query_norm, query_proj, norm, delta, *, eps):
    """Returns (normed, part, mix, weights [W, count + 1])."""
    part = part if delta is None else part + delta
    values = np.stack([*blocks[:count], part], axis=1)  # [W, count + 1, D]
    scores = (rms(values, query_norm, eps) * query_proj).sum(-1)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    mix = (weights[..., None] * values).sum(1)
    return rms(mix, norm, eps), part, mix, weights


def route(x, weight, bias, *, top_k, scaling, renormalize):
    scores = sigmoid(x @ weight.T)
    experts = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, experts, axis=1)
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdims=True) + 1e-20)
    return experts, chosen * scaling


def moe(z, experts, weights, w13, w2, activation):
    out = np.zeros_like(z)
    for row, expert, weight in zip(
        np.repeat(np.arange(len(z)), experts.shape[1]), experts.flat, weights.flat, strict=True
    ):
        gate, up = np.split(w13[expert] @ z[row], 2)
        out[row] += weight * (w2[expert] @ gated(activation, gate, up))
    return out


def mxfp4(packed, scales):
    """Decode a file's bytes by the table: u8[..., K/2], u8[..., K/32] -> float64 [..., K]."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return table[codes] * 2.0 ** (np.repeat(scales.astype(int), 32, axis=-1) - 127)


def kda_step(state, key, value, log_decay, beta):
    """One row: state [H, V, K] -> (state, update [H, V])."""
    state = np.exp(log_decay)[:, None, :] * state
    update = beta[:, None] * (value - np.einsum("hvk,hk->hv", state, key))
    return state + update[..., None] * key[:, None, :], update


def kda_inputs(rows, window, weights, lower_bound):
    """The recurrence's inputs of one request's rows: query, key, value, log decay, beta."""
    heads, value_dim = len(weights.a_log), len(weights.o_norm)
    key_width = len(weights.dt_bias)
    extended = np.concatenate([window, rows.qkv])
    length = len(rows.qkv)
    mixed = silu(sum(extended[tap : tap + length] * weights.conv[tap] for tap in range(4)))
    query, key, value = np.split(mixed, [key_width, 2 * key_width], axis=1)
    query, key = query.reshape(length, heads, -1), key.reshape(length, heads, -1)
    query = query / np.sqrt((query**2).sum(-1, keepdims=True) + 1e-6) * query.shape[-1] ** -0.5
    key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)
    z = (rows.decay + weights.dt_bias).reshape(length, heads, -1)
    rate = np.exp(weights.a_log)[:, None]
    if lower_bound is None:
        log_decay = -rate * np.logaddexp(0.0, z)
    else:
        log_decay = lower_bound * sigmoid(rate * z)
    return query, key, value.reshape(length, heads, value_dim), log_decay, sigmoid(rows.beta)


def kda_tokens(rows, window, state, weights, lower_bound, eps):
    """Run one request's rows; returns (out [T, H*V], window, state, updates [T, H, V])."""
    out, updates = np.zeros_like(rows.gate), []
    inputs = kda_inputs(rows, window, weights, lower_bound)
    for row, (query, *parts) in enumerate(zip(*inputs, strict=True)):
        state, update = kda_step(state, *parts)
        updates.append(update)
        normed = rms(np.einsum("hvk,hk->hv", state, query), weights.o_norm, eps)
        out[row] = normed.reshape(-1) * sigmoid(rows.gate[row])
    return out, np.concatenate([window, rows.qkv])[-3:], state, np.array(updates)


def kda_window(conv, start):
    """The raw rows before position `start` of a slot's ring conv [R, C]: [3, C]."""
    positions = np.arange(start - 3, start)
    return np.where(positions[:, None] < 0, 0, conv[positions % len(conv)])


def kda_replay(cache, slot, start, accepted):
    """Window and state of a slot after its accepted pending rows, the last before `start`."""
    pending, state = cache.pending, cache.state[slot]
    ring = len(cache.conv[slot])
    count = np.clip(accepted, 0, min(ring // 2, ring - 3))
    for position in range(start - count, start):
        at = slot, position % ring
        state = np.exp(pending.decay[at])[:, None, :] * state
        state = state + pending.update[at][..., None] * pending.key[at][:, None, :]
    return kda_window(cache.conv[slot], start), state


def mla(q, cached, seen, latent, scale):
    """One request: q [T, H, L+R], cached [N, L+R], seen [T] -> [T, H, L]."""
    out = np.zeros((*q.shape[:2], latent))
    for row, count in enumerate(seen):
        if count > 0:
            scores = q[row] @ cached[:count].T * scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[row] = weights / weights.sum(-1, keepdims=True) @ cached[:count, :latent]
    return out
