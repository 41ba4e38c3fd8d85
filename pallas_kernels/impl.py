"""The choice of implementation, shared by every op."""

from __future__ import annotations

from typing import Literal, get_args

Impl = Literal["reference", "pallas", "interpret"]
IMPLS: tuple[Impl, ...] = get_args(Impl)
MOST_ROWS = 64
"""Rows that the kernels of linear and route take: they stream weights past a decode step's. With
more, arithmetic bounds the product, and the library's GEMM (the reference) is right; moe, attn_res
and the choice of experts have kernels of their own for these."""


def require_impl(op: str, impl: str, available: tuple[Impl, ...] = IMPLS) -> None:
    """Raise NotImplementedError unless `impl` is one that `op` has."""
    if impl not in available:
        raise NotImplementedError(
            f"{op} has no implementation {impl!r}; choose one of {', '.join(available)}"
        )


def require_few_rows(op: str, rows: int) -> None:
    """Raise NotImplementedError if a kernel of `op` is asked for more than MOST_ROWS rows."""
    if rows > MOST_ROWS:
        raise NotImplementedError(
            f"{op}'s kernel takes up to {MOST_ROWS} rows, not {rows}: use impl='reference'"
        )
