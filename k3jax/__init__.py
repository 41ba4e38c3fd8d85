"""Kimi-K3 in JAX: decoder, engine, server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.lm import LanguageModel, load

__all__ = ["LanguageModel", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs jax only when it is used: half of this package runs without."""
    if name in __all__:
        from k3jax import lm

        return getattr(lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
