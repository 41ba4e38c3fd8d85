"""Checkpoints: Hugging Face safetensors or a converted Orbax directory -> packed params, and back.

`load_params` is what the engine calls; `python -m k3jax.convert` goes between the two kinds.
"""

from k3jax.checkpoint.export import save_hf
from k3jax.checkpoint.loading import LoadProgress, load_params, open_checkpoint
from k3jax.checkpoint.saving import by_group, save_orbax

__all__ = [
    "LoadProgress",
    "by_group",
    "load_params",
    "open_checkpoint",
    "save_hf",
    "save_orbax",
]
