"""What one forward pass knows of its rows, and what it hands from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import jax

from pallas_kernels import MOST_ROWS, Impl


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepPlan:
    """Index arrays of one step of B requests with T rows each; W = B * T. All int32 or bool.

    A null request (slot 0) has no valid row and length 0. Padding rows write to page 0 only.
    """

    kind: Literal["prefill", "decode"] = field(metadata={"static": True})
    slots: jax.Array  # [B] in [0, S); 0 is the null slot
    tokens: jax.Array  # [B, T] in [0, vocabulary)
    positions: jax.Array  # [B, T] position of each row in its request
    valid: jax.Array  # bool [B, T]
    accepted: jax.Array  # [B] pending rows that are committed before the step's own
    fresh: jax.Array  # bool [B] the request has nothing in the caches yet
    starts: jax.Array  # [B] tokens in the caches before the step
    rows: jax.Array  # [B] valid rows of this step
    page_table: jax.Array  # [B, max_pages]
    write_pages: jax.Array  # [W] where each row's latent goes
    write_offsets: jax.Array  # [W]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residual:
    """The residual stream between layers; the layer input is part + delta.

    Attention residuals keep one snapshot per started block in a buffer of fixed size, so that all
    layers of a kind are one function: rows of `blocks` from `count` on are not defined. Without
    attention residuals M is 0.
    """

    blocks: jax.Array  # [M, W, D]
    count: jax.Array  # i32[]
    part: jax.Array  # [W, D]
    delta: jax.Array  # f32[W, D] what the last sublayer returned, not yet added


def few_rows(impl: Impl, x: jax.Array) -> Impl:
    """The impl of linear, route and moe on rows x [W, ...]: beyond the kernels' limit, XLA's."""
    return impl if x.shape[0] <= MOST_ROWS else "reference"


class Tap(Protocol):
    """Receives named intermediates; `sharded` is the axis that is split over ranks, if any."""

    def __call__(self, name: str, value: jax.Array, sharded: int | None = None) -> None: ...


def silent(name: str, value: jax.Array, sharded: int | None = None) -> None:
    """The default Tap; work that only a trace needs is skipped under it."""
