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


class Convolution:
    """Short convolution of the new rows at some channels: all loads first, then the sums.

    A load costs a trip to memory, and what is written between two loads may keep the second from
    being under way with the first: kernels construct everything before they compute anything.
    """

    def __init__(
        self,
        block: Block,
        rows: KdaRows,
        weights: KdaWeights,
        columns: jax.Array,  # i32[1, X]
        valid: jax.Array,  # bool[1, X]
    ):
        self._block, self._columns, self._here = block, columns, block.is_new & valid
        self._taps = [
            read_raw(rows.qkv, (block.request, source, columns), self._here & (source >= 0))
            for source in self._sources()
        ]
        self._weights = [read_raw(weights.conv, (columns, tap), valid) for tap in range(TAPS)]

    def _sources(self) -> list[jax.Array]:
        """Row among the new ones that each tap reads; the window lies before 0."""
        return [self._block.fresh + (tap - TAPS + 1) for tap in range(TAPS)]

    def load_past(self, cache: KdaCache) -> None:
        """Load what depends on the slot: the window, moved by the replayed rows."""
        block = self._block
        self._past = []
        for source in self._sources()[:-1]:
            past = self._here & (source < 0)
            late = source + block.accepted  # among the pending rows
            moved = (block.slot, late, self._columns)
            old = (block.slot, late + TAPS - 1, self._columns)
            self._past.append(
                (
                    read_raw(cache.pending.conv, moved, past & (late >= 0)),
                    read_raw(cache.conv, old, past & (late < 0)),
                )
            )

    @property
    def raw(self) -> jax.Array:
        """The new rows as they came, zero elsewhere: [R, X]."""
        return self._taps[-1]

    def result(self) -> jax.Array:
        """SiLU of the convolution, zero in other rows: f32[R, X]."""
        wide = [tap.astype(jnp.float32) for tap in self._taps]
        for tap, (moved, old) in enumerate(self._past):
            wide[tap] += moved.astype(jnp.float32) + old.astype(jnp.float32)
        total = sum(
            (tap * weight for tap, weight in zip(wide[1:], self._weights[1:], strict=True)),
            wide[0] * self._weights[0],
        )
        return total * sigmoid(total)


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


class Gates:
    """Decay, beta and output scale of the new rows: loads first, as Convolution."""

    def __init__(
        self,
        block: Block,
        rows: KdaRows,
        weights: KdaWeights,
        lane: jax.Array,  # i32[1, K]
        value_lane: jax.Array,  # i32[1, V]
        dims: tuple[int, int],  # K, V without padding
    ):
        key_dim, value_dim = dims
        head, request, fresh = block.head, block.request, block.fresh
        valid, value_valid = lane < key_dim, value_lane < value_dim
        channel = head * key_dim + lane
        self.gate_at = (request, fresh, head * value_dim + value_lane)
        self._rate = weights.a_log[head]
        self._decay = read_raw(rows.decay, (request, fresh, channel), block.is_new & valid)
        self._bias = read_raw(weights.dt_bias, (channel,), valid)
        self._beta = read_raw(rows.beta, (request, fresh, head), block.is_new)
        self._gate = read_raw(rows.gate, self.gate_at, block.is_new & value_valid)
        self._norm = read_raw(weights.o_norm, (value_lane,), value_valid)

    def decay(self, lower_bound: float | None) -> jax.Array:
        """Log decay, meaningless in rows that are not new: f32[R, K]."""
        biased = self._decay.astype(jnp.float32) + self._bias
        rate = jnp.exp(self._rate.astype(jnp.float32))
        if lower_bound is None:
            return -rate * (jnp.maximum(biased, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(biased))))
        return lower_bound * sigmoid(rate * biased)

    def beta(self) -> jax.Array:
        return sigmoid(self._beta.astype(jnp.float32))

    def scale(self) -> jax.Array:
        """What the normed output is multiplied with: f32[R, V]."""
        return sigmoid(self._gate.astype(jnp.float32)) * self._norm
