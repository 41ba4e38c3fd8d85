"""Which layers of a model a layer kernel can replace. No jax import."""

from __future__ import annotations

from typing import Literal

from k3jax.config import K3Config

LayerKind = Literal["whole", "ffn", "stock"]


def layer_kinds(config: K3Config) -> tuple[LayerKind, ...]:
    """The kind of each layer.

    "whole": KDA and a latent mixture of experts, both behind attention residuals. "ffn": latent
    attention before such a mixture; its mixer stays an op up to the output projection. "stock":
    any other.
    """
    mixes = config.attn_res_block is not None and config.moe.latent is not None

    def kind(mixer: str, ffn: str) -> LayerKind:
        if not mixes or ffn != "moe":
            return "stock"
        return "whole" if mixer == "kda" else "ffn"

    return tuple(kind(*halves) for halves in zip(config.mixers, config.ffns, strict=True))
