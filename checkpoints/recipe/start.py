"""The weights that training starts from."""

from __future__ import annotations

import math

import numpy as np

from checkpoints.recipe.forward import unquantized
from checkpoints.recipe.optimize import kind_of
from k3jax.config import K3Config
from k3jax.logical import ParamSpec, logical_params

EMBED_STD = 0.5
HEAD_STD = 0.02
WEAKEST_DECAY, STRONGEST_DECAY = 1e-3, 1.0  # of a KDA channel in a token, in natural logarithms
RESIDUAL = ("kda.o", "mla.o", "dense.down", "moe.up", "moe.shared_down", "moe.w2")
ZERO = ("res_proj", "attn_res_proj", "ffn_res_proj", "moe.bias", "kda.a_log")


def start_params(config: K3Config, seed: int) -> dict[str, np.ndarray]:
    """Master weights f32 by logical name, experts as matrices; the router's bias is zero.

    What a sublayer adds to the residual stream starts small, the mixes of blocks start even, and
    KDA's channels forget at rates from one token to a thousand.
    """
    rng = np.random.default_rng(seed)
    specs = logical_params(unquantized(config))
    return {name: _start(name, spec, config, rng) for name, spec in specs.items()}


def _start(name: str, spec: ParamSpec, config: K3Config, rng: np.random.Generator) -> np.ndarray:
    kind = kind_of(name)
    if kind in ZERO:
        return np.zeros(spec.shape, np.float32)
    if kind == "kda.dt_bias":
        rate = np.exp(rng.uniform(np.log(WEAKEST_DECAY), np.log(STRONGEST_DECAY), spec.shape))
        share = rate / -(config.kda.gate_lower_bound or -1.0)
        return np.log(share / (1.0 - share)).astype(np.float32)
    if kind.startswith("kda.conv"):
        return rng.uniform(-0.5, 0.5, spec.shape).astype(np.float32)
    if len(spec.shape) == 1:
        return np.ones(spec.shape, np.float32)
    deviation = {"embed": EMBED_STD, "head": HEAD_STD}.get(kind, spec.shape[-1] ** -0.5)
    if kind in RESIDUAL:
        deviation /= math.sqrt(2 * config.num_layers)
    return rng.normal(0.0, deviation, spec.shape).astype(np.float32)
