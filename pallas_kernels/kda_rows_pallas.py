"""Where a program of the KDA decode kernel stands, and the parts that its forms share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_types import TAPS, KdaCache, KdaWeights, most_rows
from pallas_kernels.norm import L2_EPS

REPLAYED = 4  # pending rows whose loads are under way together


def read(ref: Any, index: tuple, mask: jax.Array | None = None) -> jax.Array:
    """Load ref[index] as float32; masked elements are zero."""
    return read_raw(ref, index, mask).astype(jnp.float32)


def read_raw(ref: Any, index: tuple, mask: jax.Array | None = None) -> jax.Array:
    """Load ref[index]; masked elements are zero."""
    if mask is None:
        return launch.load(ref.at[index])
    return launch.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def silu(x: jax.Array, maths: Maths) -> jax.Array:
    return x * maths.sigmoid(x)


def l2_normalize(x: jax.Array, axis: int, maths: Maths) -> jax.Array:
    """As norm.l2_norm, over `axis`."""
    return x * maths.rsqrt(jnp.sum(x * x, axis=axis, keepdims=True) + L2_EPS)


def log_decay(
    projection: jax.Array,
    bias: jax.Array,
    a_log: jax.Array,
    lower_bound: float | None,
    maths: Maths,
) -> jax.Array:
    """As kda_common.decay_gate, of one head."""
    biased = projection.astype(jnp.float32) + bias
    rate = jnp.exp(a_log.astype(jnp.float32))
    if lower_bound is None:
        return -rate * (jnp.maximum(biased, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(biased))))
    return lower_bound * maths.sigmoid(rate * biased)


def masked(index: tuple, *masks: jax.Array | None) -> jax.Array | None:
    """The masks that are given, together, in the shape that `index` spans."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    shape = jnp.broadcast_shapes(*(jnp.shape(part) for part in index))
    return jnp.broadcast_to(reduce(and_, given), shape)


@dataclass(frozen=True)
class Place:
    """One program: a strip of values of a head of a request.

    The state is [V, K]: vectors over keys are lines [1, K], vectors over the strip's values are
    columns [V, 1] where they meet it. Masks are None where nothing is padded.
    """

    request: jax.Array  # i32[]
    head: jax.Array  # i32[]
    slot: jax.Array  # i32[] 0 if there is no request
    start: jax.Array  # i32[] position of the first new row
    replayed: jax.Array  # i32[] rows before it that the state lacks
    part: jax.Array  # i32[] number of the strip
    strip: int
    key_tile: int
    dims: tuple[int, int, int]  # H, V, K
    ring: int  # R

    @property
    def is_first(self) -> jax.Array:
        """Whether this strip writes what a head's strips share: bool[]."""
        return self.part == 0

    def ring_row(self, offset: Any) -> Any:
        """Where the row at start + offset lies in a ring."""
        return (self.start + offset) & (self.ring - 1)

    @property
    def key(self) -> jax.Array:
        """The head's key channels: i32[1, K]."""
        return lax.broadcasted_iota(jnp.int32, (1, self.key_tile), 1)

    @property
    def key_valid(self) -> jax.Array | None:
        return None if self.dims[2] == self.key_tile else self.key < self.dims[2]

    def value(self, axis: int) -> jax.Array:
        """The strip's values along `axis` of two."""
        shape = (self.strip, 1) if axis == 0 else (1, self.strip)
        return self.part * self.strip + lax.broadcasted_iota(jnp.int32, shape, axis)

    def value_valid(self, axis: int) -> jax.Array | None:
        size = self.dims[1]
        return None if size % self.strip == 0 else self.value(axis) < size

    def out_column(self, axis: int) -> jax.Array:
        return self.head * self.dims[1] + self.value(axis)

    @property
    def state_at(self) -> tuple:
        return self.slot, self.head, self.value(0), self.key

    @property
    def state_valid(self) -> jax.Array | None:
        return masked(self.state_at, self.key_valid, self.value_valid(0))


def locate(
    slots: Any, starts: Any, accepted: Any, cache: KdaCache, strip: int, key_tile: int
) -> Place:
    """The place of this program in the grid (strips, heads, requests)."""
    part, head, request = (pl.program_id(axis) for axis in range(3))
    _, heads, value_dim, key_dim = cache.state.shape
    slot = slots[request]
    replayed = jnp.int32(0)
    if accepted is not None:
        replayed = jnp.where(slot > 0, jnp.clip(accepted[request], 0, most_rows(cache)), 0)
    return Place(
        request=request,
        head=head,
        slot=slot,
        start=starts[request],
        replayed=replayed,
        part=part,
        strip=strip,
        key_tile=key_tile,
        dims=(heads, value_dim, key_dim),
        ring=cache.conv.shape[1],
    )


def taps(weights: KdaWeights, column: jax.Array, mask: jax.Array | None) -> list[jax.Array]:
    """The convolution's factors at some channels, oldest row first."""
    return [read_raw(weights.conv, (tap, column), mask) for tap in range(TAPS)]


def finish(
    place: Place,
    out: jax.Array,  # f32[R, X] before the norm
    gate: jax.Array,  # f32[R, X]
    scale: jax.Array,  # f32[1, X] or [R, X], o_norm
    norm_eps: float | None,
    axes: tuple[int, ...],
    maths: Maths,
) -> tuple[jax.Array, jax.Array]:
    """rms(out) * scale * sigmoid(gate), and the sums of out's squares; zero in the null slot.

    `axes` hold a row's values, zero where there is none. Without `norm_eps` the rows are not
    divided by their root mean square.
    """
    squares = out * out
    for axis in axes:
        squares = jnp.sum(squares, axis=axis, keepdims=True)
    out = out * maths.sigmoid(gate) * scale
    if norm_eps is not None:
        out *= maths.rsqrt(squares * (1.0 / place.dims[1]) + norm_eps)
    live = place.slot > 0
    return jnp.where(live, out, 0.0), jnp.where(live, squares, 0.0)


def store(ref: Any, index: tuple, value: jax.Array, *masks: jax.Array | None) -> None:
    """Store `value` in the ref's dtype where all masks hold."""
    mask = masked(index, *masks)
    launch.store(ref.at[index], value.astype(ref.dtype), mask=mask)
