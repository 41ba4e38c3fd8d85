"""Loads, convolution and gates of a block of KDA rows inside a Pallas kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.health import BIT_SLOT
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights
from pallas_kernels.norm import L2_EPS

TAPS = 4
BIT_NONFINITE = 1 << 16  # of the words the kernels return; no bit of the health word


def read(ref: Any, index: tuple, mask: jax.Array | None = None) -> jax.Array:
    """Load ref[index] as float32; masked elements are zero."""
    return read_raw(ref, index, mask).astype(jnp.float32)


def read_raw(ref: Any, index: tuple, mask: jax.Array | None = None) -> jax.Array:
    """Load ref[index]; masked elements are zero."""
    if mask is None:
        return launch.load(ref.at[index])
    return launch.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def l2_normalize(x: jax.Array, axis: int) -> jax.Array:
    """As norm.l2_norm, over `axis`."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=axis, keepdims=True) + L2_EPS)


def locate(slots, accepted, size: int, pending: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The program's slot, live or null, and how many rows it replays, from grid (heads, requests).

    Returns (slot number as given, slot, replayed rows): i32[] each.
    """
    request = pl.program_id(1)
    given = slots[request]
    live = (given > 0) & (given < size)
    count = jnp.clip(accepted[request], 0, pending)
    return given, jnp.where(live, given, 0), jnp.where(live, count, 0)


def report(given: jax.Array, size: int, broken: jax.Array) -> jax.Array:
    """The program's word: BIT_SLOT, and BIT_NONFINITE of a live request."""
    live = (given > 0) & (given < size)
    nonfinite = jnp.where(live & broken, BIT_NONFINITE, 0)
    return nonfinite | jnp.where(given >= size, BIT_SLOT, 0)


@dataclass(frozen=True)
class Block:
    """The rows of one program: replayed ones first, the new ones from `first_new` on."""

    request: jax.Array  # i32[]
    head: jax.Array  # i32[]
    slot: jax.Array  # i32[]
    accepted: jax.Array  # i32[] rows to replay
    row: jax.Array  # i32[R, 1] row of the block
    first_new: int
    new: int  # new rows of the request

    @property
    def fresh(self) -> jax.Array:
        """Row among the new ones, negative for the replayed: i32[R, 1]."""
        return self.row - self.first_new

    @property
    def is_new(self) -> jax.Array:
        return (self.fresh >= 0) & (self.fresh < self.new)

    @property
    def is_old(self) -> jax.Array:
        return self.row < self.accepted


def convolve(
    block: Block,
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    columns: jax.Array,  # i32[1, X], or [X, 1] of one row
    valid: jax.Array,  # bool, as `columns`
) -> tuple[jax.Array, jax.Array]:
    """Short convolution of the new rows at some channels.

    Returns (SiLU of the convolution f32[R, X], the raw projections f32[R, X]), zero elsewhere.
    """
    here = block.is_new & valid
    raw = read(rows.qkv, (block.request, block.fresh, columns), here)
    total = raw * read(weights.conv, (columns, TAPS - 1), valid)
    for tap in range(TAPS - 1):
        source = block.fresh + (tap - TAPS + 1)  # among the new rows; the window lies before 0
        past = here & (source < 0)
        late = source + block.accepted  # among the pending rows
        taken = read(rows.qkv, (block.request, source, columns), here & (source >= 0))
        taken += read(cache.pending.conv, (block.slot, late, columns), past & (late >= 0))
        taken += read(cache.conv, (block.slot, late + TAPS - 1, columns), past & (late < 0))
        total += taken * read(weights.conv, (columns, tap), valid)
    return total * sigmoid(total), raw


def moved_window(
    block: Block, cache: KdaCache, columns: jax.Array, valid: jax.Array
) -> tuple[tuple, jax.Array, jax.Array]:
    """The window after the replay at `columns` i32[1, X].

    Returns (index of the pool, mask bool[4, X], raw projections [4, X]).
    """
    row = lax.broadcasted_iota(jnp.int32, (TAPS, 1), 0)
    kept = valid & (row < TAPS - 1)
    source = row + block.accepted
    late = source - (TAPS - 1)
    old = read_raw(cache.conv, (block.slot, source, columns), kept & (late < 0))
    moved = read_raw(cache.pending.conv, (block.slot, late, columns), kept & (late >= 0))
    return (block.slot, row, columns), kept, jnp.where(late < 0, old, moved)


def fresh_decay(
    block: Block,
    rows: KdaRows,
    weights: KdaWeights,
    lane: jax.Array,  # i32[1, K], or [K, 1] of one row
    valid: jax.Array,  # bool, as `lane`
    lower_bound: float | None,
) -> jax.Array:
    """Log decay of the new rows; meaningless in others: f32[R, K]."""
    channel = block.head * (rows.decay.shape[2] // rows.beta.shape[2]) + lane
    biased = read(rows.decay, (block.request, block.fresh, channel), block.is_new & valid)
    biased += read(weights.dt_bias, (channel,), valid)
    rate = jnp.exp(weights.a_log[block.head].astype(jnp.float32))
    if lower_bound is None:
        return -rate * (jnp.maximum(biased, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(biased))))
    return lower_bound * sigmoid(rate * biased)
