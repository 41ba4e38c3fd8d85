"""The latent mixture of experts from the inside: router load, overlap of rows, and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.explore import Trace, layers_with
from k3jax.lm import LanguageModel
from pallas_kernels.mxfp4 import GROUP, dequantize, pack_words, quantize

_expand = jax.jit(dequantize)
_expand_packed = jax.jit(lambda packed, scales: dequantize(pack_words(packed), scales))
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the codes 0 to 7


def counts(trace: Trace, config: K3Config) -> tuple[list[int], np.ndarray]:
    """How often each expert is chosen: (layers, i64[layers, E])."""
    layers, experts = layers_with(trace, "router_experts"), config.moe.num_experts
    each = [np.bincount(chosen(trace, layer).ravel(), minlength=experts) for layer in layers]
    return layers, np.stack(each)


def load(trace: Trace, config: K3Config) -> tuple[list[int], np.ndarray]:
    """How often each expert is chosen, relative to an even load: (layers, [layers, E])."""
    layers, found = counts(trace, config)
    return layers, found * config.moe.num_experts / found.sum(axis=1, keepdims=True)


def chosen(trace: Trace, layer: int) -> np.ndarray:
    """The experts of each token i32[T, J]."""
    return trace[f"layers.{layer}.router_experts"]


def distinct(choices: np.ndarray, rows: Sequence[int], *, shuffled: bool = False) -> np.ndarray:
    """How many different experts some rows of a step choose together, on average.

    choices: i32[T, J]. For each number in `rows`: over all windows of so many consecutive tokens,
    which is what a verify step brings; `shuffled`: over rows taken from anywhere in the text, which
    is what a batch of unrelated requests brings.
    """
    if shuffled:
        choices = np.random.default_rng(0).permutation(choices)
    means = []
    for count in rows:
        starts = range(len(choices) - count + 1)
        means.append(np.mean([len(np.unique(choices[at : at + count])) for at in starts]))
    return np.array(means)


def distinct_if_even(config: K3Config, rows: Sequence[int]) -> np.ndarray:
    """What `distinct` would be if each row chose its experts evenly and independently."""
    moe = config.moe
    missed = (1 - moe.top_k / moe.num_experts) ** np.asarray(rows)
    return moe.num_experts * (1 - missed)


def expert_bytes(config: K3Config) -> float:
    """Bytes of one routed expert of one layer, as the device holds them."""
    moe = config.moe
    bits = 4 + 8 / GROUP if moe.mxfp4 else 16
    return 3 * moe.inner * (moe.latent or config.hidden_size) * bits / 8


def other_bytes(config: K3Config) -> float:
    """Bytes that a mixture of experts reads beside its experts, whatever the rows, in bf16."""
    moe, hidden = config.moe, config.hidden_size
    latent = 2 * hidden * moe.latent if moe.latent else 0
    return 2 * (moe.num_experts * hidden + latent + 3 * hidden * moe.shared_inner)


def relative_error(weight: np.ndarray) -> float:
    """What rounding a matrix [..., K] to MXFP4 changes: RMS of the change over RMS of the matrix.

    ValueError unless K is a multiple of 32.
    """
    weight = np.asarray(weight, np.float32)
    packed, scales = quantize(weight)
    rounded = np.asarray(_expand_packed(packed, scales))
    return float(np.linalg.norm(rounded - weight) / np.linalg.norm(weight))


def layer_matrices(lm: LanguageModel, layer: int) -> dict[str, np.ndarray]:
    """The matrices of a layer's halves whose rows MXFP4 can cut into groups, as float32.

    The routed experts are expanded from what is stored; the others are bf16 in K3. ValueError for
    a layer without MXFP4 experts.
    """
    params: Mapping[str, Any] = lm.params["layers"][layer]
    mixer, ffn = params["mixer"], params["ffn"]
    if "w13_scale" not in ffn:
        raise ValueError(f"layer {layer} has no MXFP4 experts")
    found = {
        "mixer in": mixer["in_proj"],
        "mixer out": mixer["o_proj"],
        "shared experts in": ffn["shared_gate_up"],
        "shared experts out": ffn["shared_down"],
        "latent down": ffn["down"],
        "latent up": ffn["up"],
        "routed experts in": _expand(ffn["w13"], ffn["w13_scale"]),
        "routed experts out": _expand(ffn["w2"], ffn["w2_scale"]),
    }
    return {
        name: np.asarray(value, np.float32)
        for name, value in found.items()
        if value.shape[-1] % GROUP == 0
    }


def errors_by_layer(lm: LanguageModel) -> dict[str, np.ndarray]:
    """`relative_error` of each matrix of each mixture layer, NaN for other layers, by name."""
    layers = lm.config.num_layers
    errors: dict[str, np.ndarray] = {}
    for layer in range(layers):
        if lm.config.ffns[layer] == "moe":
            for name, weight in layer_matrices(lm, layer).items():
                errors.setdefault(name, np.full(layers, np.nan))[layer] = relative_error(weight)
    return errors


def code_shares(lm: LanguageModel, layer: int) -> np.ndarray:
    """How often each magnitude of VALUES stands in a layer's routed experts, in percent [8]."""
    ffn = lm.params["layers"][layer]["ffn"]
    found = np.zeros(len(VALUES))
    for name in ("w13", "w2"):
        ones = jnp.full_like(ffn[f"{name}_scale"], 127)  # a scale of 1
        values = np.abs(np.asarray(_expand(ffn[name], ones)))
        found += np.bincount(np.searchsorted(VALUES, values.ravel()), minlength=len(VALUES))
    return 100 * found / found.sum()


def normal_code_shares() -> np.ndarray:
    """`code_shares` of normally distributed weights."""
    packed, _ = quantize(np.random.default_rng(0).standard_normal((4096, GROUP)))
    codes = np.stack([packed & 7, packed >> 4 & 7])
    return 100 * np.bincount(codes.ravel(), minlength=len(VALUES)) / codes.size
