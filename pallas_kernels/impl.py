"""The choice of implementation, shared by every op."""

from __future__ import annotations

from typing import Literal

Impl = Literal["reference", "pallas", "interpret"]


def require_impl(op: str, impl: str, available: tuple[str, ...] = ("reference",)) -> None:
    """Raise NotImplementedError unless `impl` is one that `op` has."""
    if impl not in available:
        raise NotImplementedError(
            f"{op} has no implementation {impl!r}; choose one of {', '.join(available)}"
        )
