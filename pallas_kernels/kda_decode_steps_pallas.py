"""KDA decode, row after row: exact in float32, and the fastest for few rows.

A warp keeps whole lines of the state [V, K], and its own copy of every vector over keys: all arrays
are tiles of a line a warp. So sums over keys stay inside a warp, nothing changes its layout, and
warps meet in the norm alone. A tile of values has the warp's own ones in its first lanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_rows_pallas import (
    REPLAYED,
    Place,
    finish,
    l2_normalize,
    locate,
    log_decay,
    masked,
    read,
    read_raw,
    silu,
    store,
    taps,
)
from pallas_kernels.kda_types import TAPS, KdaCache, KdaRows, most_rows


class _Lines:
    """How the strip's values lie: value own * row + j is line j of warp `row`, lane j of a tile.

    A tile of values is as wide as a warp has lanes, one of vectors over keys as a line.
    """

    def __init__(self, place: Place, warps: int, lanes: int):
        self.own = place.strip // warps
        self.row = lax.broadcasted_iota(jnp.int32, (warps, 1), 0)
        self.key = lax.broadcasted_iota(jnp.int32, (warps, place.key_tile), 1)
        self.lane = lax.broadcasted_iota(jnp.int32, (warps, lanes), 1)
        self.first = self.row == 0
        self._start = place.part * place.strip + self.row * self.own
        self._size = place.dims[1]
        self._padded = place.dims[1] % place.strip != 0
        self.key_valid = None if place.dims[2] == place.key_tile else self.key < place.dims[2]
        here = self.lane < self.own
        self.here = here & (self.tile < self._size) if self._padded else here

    @property
    def tile(self) -> jax.Array:
        """The values of a tile's lanes, where `here` holds: i32[R, L]."""
        return self._start + self.lane

    def value(self, line: int) -> tuple[jax.Array, jax.Array | None]:
        """The value of line j of every warp, i32[R, 1], and whether there is one."""
        value = self._start + line
        return value, value < self._size if self._padded else None

    def state(self, place: Place, line: int) -> tuple[tuple, jax.Array | None]:
        """Index and mask of line j of every warp."""
        value, valid = self.value(line)
        at = (place.slot, place.head, value, self.key)
        return at, masked(at, self.key_valid, valid)

    def pick(self, tile: jax.Array, line: int) -> jax.Array:
        """Lane j of every row: f32[R, 1]."""
        return jnp.sum(jnp.where(self.lane == line, tile, 0.0), axis=1, keepdims=True)

    def gather(self, columns: list[jax.Array]) -> jax.Array:
        """The opposite of `pick`: f32[R, L], zero in other lanes."""
        tile = jnp.zeros(self.lane.shape, jnp.float32)
        for line, column in enumerate(columns):
            tile = jnp.where(self.lane == line, column, tile)
        return tile


def _replayed(
    place: Place, lines: _Lines, cache: KdaCache, together: int, maths: Maths
) -> list[jax.Array]:
    """The state's lines after the accepted pending rows, `together` of them at a time."""
    pending = cache.pending

    def load(row):
        at = (place.slot, place.ring_row(row - place.replayed), place.head)
        use = row < place.replayed
        key_at = (*at, lines.key)
        key_mask = masked(key_at, use, lines.key_valid)
        updates = []
        for number in range(lines.own):
            value, valid = lines.value(number)
            mask = masked((*at, value), use, valid)
            updates.append(read_raw(pending.update, (*at, value), mask))
        key = read(pending.key, key_at, key_mask)
        return key, updates, read_raw(pending.decay, key_at, key_mask)

    def advance(group, state):
        for key, updates, decay in [load(group * together + row) for row in range(together)]:
            shrink = maths.exp(decay)
            state = [
                maths.fma(update, key, line * shrink)
                for line, update in zip(state, updates, strict=True)
            ]
        return state

    state = [read_raw(cache.state, *lines.state(place, line)) for line in range(lines.own)]
    if most_rows(cache) == 1:
        return advance(0, state)
    return lax.fori_loop(0, (place.replayed + together - 1) // together, advance, state)


def _raw_rows(place: Place, rows: KdaRows, cache: KdaCache, row, column, valid) -> list[jax.Array]:
    """What the convolution of a row reads at `column`, oldest first, as it came."""
    read_rows = []
    for source in range(1 - TAPS, 1):
        source += row
        ring_at = (place.slot, place.ring_row(source), column)
        new_at = (place.request, source, column)
        if isinstance(source, int):
            is_new = source >= 0
            at = new_at if is_new else ring_at
            mask = masked(at, None if is_new else place.start + source >= 0, valid)
            read_rows.append(read_raw(rows.qkv if is_new else cache.conv, at, mask))
            continue
        past = masked(ring_at, (source < 0) & (place.start + source >= 0), valid)
        new = read_raw(rows.qkv, new_at, masked(new_at, source >= 0, valid))
        # One of the two is zero, and zero added leaves the other as it is.
        read_rows.append(new + read_raw(cache.conv, ring_at, past))
    return read_rows


def steps_kernel(
    slots,  # i32[B]
    starts,  # i32[B]
    accepted,  # i32[B]
    rows,  # KdaRows
    weights,  # KdaWeights
    cache,  # KdaCache
    out_ref,  # [B, T, H*V]
    squares_ref,  # f32[B, T, H, strips] sums of squares before the norm
    broken,  # bool[B, H, strips] something of a live request is not finite
    after,  # KdaCache, the same memory as `cache`
    *,
    warps: int,
    lanes: int,
    strip: int,
    key_tile: int,
    lower_bound: float | None,
    norm_eps: float | None,
    maths: Maths,
    interpret: bool,
):
    """All loads first: what is written between two loads may keep the second waiting."""
    place = locate(slots, starts, accepted, cache, strip, key_tile)
    lines = _Lines(place, warps, lanes)
    request, head = place.request, place.head
    heads, value_dim, key_dim = place.dims
    new, dtype = rows.qkv.shape[1], rows.qkv.dtype
    valid, here = lines.key_valid, lines.here
    shared = lines.first & place.is_first
    channel, out_column = head * key_dim + lines.key, head * value_dim + lines.tile
    columns = [
        (channel, valid),
        (heads * key_dim + channel, valid),
        (2 * heads * key_dim + out_column, here),
    ]
    factors = [taps(weights, *column) for column in columns]
    bias = read_raw(weights.dt_bias, (channel,), valid)
    scale = read_raw(weights.o_norm, (lines.tile,), here)

    def load(row) -> dict[str, Any]:
        return {
            "raw": [_raw_rows(place, rows, cache, row, *column) for column in columns],
            "decay": read_raw(rows.decay, (request, row, channel), valid),
            "beta": rows.beta[request, row, head].astype(jnp.float32),
            "gate": read(rows.gate, (request, row, out_column), here),
        }

    def aside(index: jax.Array, mask: jax.Array, size: int) -> jax.Array:
        # Interpreted, a masked store writes back what it found: let it be nowhere.
        nowhere = size + lax.broadcasted_iota(jnp.int32, index.shape, 1)
        return jnp.where(mask, index, nowhere) if interpret else index

    def advance(row, loaded, state):
        """Run one row: (state's lines, whether its o is not finite)."""
        query, key, value = (
            silu(sum(x.astype(jnp.float32) * tap for x, tap in zip(raw, each, strict=True)), maths)
            for raw, each in zip(loaded["raw"], factors, strict=True)
        )
        query = l2_normalize(query, 1, maths) * key_dim**-0.5
        key = l2_normalize(key, 1, maths).astype(dtype)
        value = value.astype(dtype).astype(jnp.float32)
        wide = key.astype(jnp.float32)
        decay = log_decay(loaded["decay"], bias, weights.a_log[head], lower_bound, maths)
        shrink, rate = maths.exp(decay), maths.sigmoid(loaded["beta"])
        match = jnp.sum(query * wide, axis=1, keepdims=True)
        state = [line * shrink for line in state]
        updates = [
            rate * (lines.pick(value, number) - jnp.sum(line * wide, axis=1, keepdims=True))
            for number, line in enumerate(state)
        ]
        outs = [
            jnp.sum(line * query, axis=1, keepdims=True) + match * update
            for line, update in zip(state, updates, strict=True)
        ]
        state = [maths.fma(update, wide, line) for line, update in zip(state, updates, strict=True)]
        out, squares = finish(
            place, lines.gather(outs), loaded["gate"], scale, norm_eps, (1, 0), maths
        )
        at = (place.slot, place.ring_row(row))
        store(out_ref, (request, row, aside(out_column, here, heads * value_dim)), out, here)
        part = jnp.broadcast_to(place.part, squares.shape)
        store(squares_ref, (request, row, head, part), squares)
        value_at = (*at, head, aside(lines.tile, here, value_dim))
        store(after.pending.update, value_at, lines.gather(updates), here)
        key_at = (*at, head, aside(lines.key, shared, key_dim))
        store(after.pending.key, key_at, key, shared, valid)
        store(after.pending.decay, key_at, decay, shared, valid)
        kept = zip(columns, loaded["raw"], (shared, shared, here), strict=True)
        for (column, mask), raw, once in kept:
            column = aside(column, once, cache.conv.shape[2])
            store(after.conv, (*at, column), raw[-1], once, mask)
        return state, jnp.sum(out * 0.0) != 0.0

    loaded = load(0) if new == 1 else None
    # Most steps follow one of as many rows.
    state = _replayed(place, lines, cache, min(REPLAYED, new), maths)
    for number, line in enumerate(state):
        at, mask = lines.state(place, number)
        store(after.state, at, line, mask)
    if new == 1:
        _, bad = advance(0, loaded, state)
    else:

        def step(row, carry):
            state, bad = carry
            state, more = advance(row, load(row), state)
            return state, bad | more

        _, bad = lax.fori_loop(0, new, step, (state, jnp.bool_(False)))
    broken[request, head, place.part] = (place.slot > 0) & bad
