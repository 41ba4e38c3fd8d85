"""Attention residuals from the inside: which earlier block each sublayer reads."""

from __future__ import annotations

import numpy as np

from k3jax.config import K3Config
from k3jax.explore import Trace


def reads(trace: Trace, config: K3Config) -> tuple[list[str], np.ndarray]:
    """The weights with which each sublayer mixes its input, in the order of computation.

    Returns (names, weights [sublayers, T, M + 1]); the last column is the running sum's, a block
    that does not exist yet is NaN. Block n is the residual stream before layer n * block size, so
    block 0 is the embedding. ValueError for a model without attention residuals.
    """
    block = config.attn_res_block
    if block is None:
        raise ValueError("this model has no attention residuals")
    names, weights = [], []
    for layer in range(config.num_layers):
        # A layer that starts a block stores it after its mixer's mix and before its other half's.
        for half, started in (("attn", -(-layer // block)), ("ffn", layer // block + 1)):
            names.append(f"{layer} {half if half == 'ffn' else config.mixers[layer]}")
            weights.append(_until(trace[f"layers.{layer}.{half}_res_weights"], started))
    names.append("output")
    weights.append(_until(trace["output_res_weights"], -(-config.num_layers // block)))
    return names, np.stack(weights)


def _until(weights: np.ndarray, started: int) -> np.ndarray:
    """Weights [T, M + 1] with NaN for the blocks from `started` on."""
    weights = weights.astype(np.float64)
    weights[:, started:-1] = np.nan
    return weights


def existing(weights: np.ndarray) -> np.ndarray:
    """How many sources each sublayer can read [sublayers]."""
    return (~np.isnan(weights[:, 0])).sum(axis=-1)


def sources(weights: np.ndarray) -> np.ndarray:
    """How many sources a mix [..., M + 1] has in effect: exp of its entropy, from 1 to M + 1."""
    shares = np.where(weights > 0, weights, 1.0)  # NaN and 0 add nothing
    return np.exp(-(shares * np.log(shares)).sum(axis=-1))


def spread(weights: np.ndarray) -> np.ndarray:
    """How much each sublayer's mix varies from token to token [sublayers].

    It is the standard deviation over the tokens of the weight that varies most.
    """
    return np.nan_to_num(weights).std(axis=1).max(axis=1)
