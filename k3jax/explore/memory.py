"""KDA from the inside: what decays, what a state holds, and two ways to compute it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.explore import Trace
from k3jax.explore.clock import best_seconds
from pallas_kernels import l2_norm
from pallas_kernels.kda_common import KdaInputs, delta_step
from pallas_kernels.kda_prefill_reference import CHUNK, chunk_delta


def retention(trace: Trace, layer: int) -> np.ndarray:
    """The share of the state that each channel keeps at each token, exp(decay) [T, H, K]."""
    return np.exp(trace[f"layers.{layer}.kda_decay"].astype(np.float64))


def half_lives(trace: Trace, layer: int) -> np.ndarray:
    """Tokens after which half of what a channel held is gone, at its mean decay [H, K]; to 1e9."""
    decay = trace[f"layers.{layer}.kda_decay"].astype(np.float64).mean(axis=0)
    return np.log(2) / np.maximum(-decay, np.log(2) / 1e9)


def recurrence(trace: Trace, layer: int, config: K3Config) -> KdaInputs:
    """What the recurrence of a layer read of each token: leaves [1, T, H, K or V], float32."""
    prefix, heads = f"layers.{layer}.kda_", config.kda.num_heads

    def by_head(name: str) -> jax.Array:
        part = jnp.asarray(trace[prefix + name]).astype(jnp.float32)
        return part.reshape(1, part.shape[0], heads, -1)

    return KdaInputs(
        query=l2_norm(by_head("q")) * config.kda.head_dim**-0.5,
        key=l2_norm(by_head("k")),
        value=by_head("v"),
        decay=by_head("decay"),
        beta=by_head("beta")[..., 0],
    )


def _rows(inputs: KdaInputs) -> tuple[jax.Array, ...]:
    """The inputs with the tokens first, for a scan."""
    leaves = (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)
    return tuple(jnp.moveaxis(leaf, 1, 0) for leaf in leaves)


def _empty_state(inputs: KdaInputs) -> jax.Array:
    batch, _, heads, key_dim = inputs.key.shape
    return jnp.zeros((batch, heads, inputs.value.shape[-1], key_dim), jnp.float32)


@jax.jit
def recurrent(inputs: KdaInputs) -> jax.Array:
    """Outputs f32[1, T, H, V], one token after the other."""

    def advance(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, *rest = row
        state, _ = delta_step(state, *rest)
        return state, jnp.sum(state * query[..., None, :], axis=-1)

    _, out = jax.lax.scan(advance, _empty_state(inputs), _rows(inputs))
    return jnp.moveaxis(out, 0, 1)


@jax.jit
def chunked(inputs: KdaInputs) -> jax.Array:
    """Outputs f32[1, T, H, V], CHUNK tokens at a time; T a multiple of CHUNK."""

    def split(leaf: jax.Array) -> jax.Array:
        chunks = leaf.reshape(leaf.shape[0], -1, CHUNK, *leaf.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    _, out = jax.lax.scan(chunk_delta, _empty_state(inputs), jax.tree.map(split, inputs))
    return jnp.moveaxis(out, 0, 1).reshape(inputs.value.shape)


@jax.jit
def _norms(inputs: KdaInputs) -> jax.Array:
    def advance(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        state, _ = delta_step(state, *row[1:])
        return state, jnp.sqrt(jnp.sum(state * state, axis=(-1, -2)))

    return jax.lax.scan(advance, _empty_state(inputs), _rows(inputs))[1][:, 0]


def state_norms(trace: Trace, layer: int, config: K3Config) -> np.ndarray:
    """The Frobenius norm of each head's state after each token [T, H]."""
    return np.asarray(_norms(recurrence(trace, layer, config)))


@jax.jit
def _read_back(inputs: KdaInputs, keys: jax.Array) -> jax.Array:
    """Cosine between what each state gives for keys [T, H, K] and the values: [T, T, H]."""
    value = inputs.value[0]
    length = jnp.sqrt(jnp.sum(value * value, axis=-1))

    def advance(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        state, _ = delta_step(state, *row[1:])
        read = jnp.einsum("hvk,shk->shv", state[0], keys)
        norm = jnp.sqrt(jnp.sum(read * read, axis=-1)) * length
        return state, jnp.sum(read * value, axis=-1) / jnp.maximum(norm, 1e-20)

    return jax.lax.scan(advance, _empty_state(inputs), _rows(inputs))[1]


def recall(trace: Trace, layer: int, config: K3Config) -> tuple[np.ndarray, np.ndarray]:
    """How well a state answers for a token that was written some tokens ago.

    The probe asks the state after token t with the key of token t - lag, and compares the answer
    with the value that was written then, by cosine, over all t and heads. Returns (recall [T - 1],
    control [T - 1]) by lag; the control asks with the key of another token, chosen at random, so it
    is what all values have in common. Nothing is trained.
    """
    inputs = recurrence(trace, layer, config)
    tokens = inputs.key.shape[1]
    other = np.random.default_rng(0).permutation(tokens)
    means = []
    for keys in (inputs.key[0], inputs.key[0][other]):
        cosines = np.asarray(_read_back(inputs, keys)).mean(axis=-1)  # [after t, of token s]
        means.append([np.diagonal(cosines, -lag).mean() for lag in range(tokens - 1)])
    return np.array(means[0]), np.array(means[1])


def compare_forms(trace: Trace, layer: int, config: K3Config) -> np.ndarray:
    """The largest difference between both forms at each token, as a share of the output [T].

    T is cut to whole chunks.
    """
    inputs = recurrence(trace, layer, config)
    whole = inputs.key.shape[1] // CHUNK * CHUNK
    inputs = jax.tree.map(lambda leaf: leaf[:, :whole], inputs)
    one, other = (np.asarray(form(inputs))[0] for form in (recurrent, chunked))
    return np.abs(one - other).max(axis=(1, 2)) / np.abs(one).max()


def time_forms(
    trace: Trace, layer: int, config: K3Config, lengths: tuple[int, ...]
) -> Mapping[str, np.ndarray]:
    """Microseconds a token of both forms on this machine, by the number of tokens.

    The traced tokens are repeated to each length, a multiple of CHUNK.
    """
    inputs = recurrence(trace, layer, config)
    times: dict[str, list[float]] = {"recurrent": [], "chunked": []}
    for length in lengths:
        places = np.arange(length) % inputs.key.shape[1]
        taken = jax.tree.map(lambda leaf, at=places: leaf[:, at], inputs)
        for name, form in (("recurrent", recurrent), ("chunked", chunked)):
            times[name].append(best_seconds(form, taken) * 1e6 / length)
    return {name: np.array(values) for name, values in times.items()}
