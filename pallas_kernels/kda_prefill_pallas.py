"""KDA prefill: chunks of 64 rows in the WY form, in two Pallas kernels.

`kda_prefill_chunk` makes of every chunk at once, independent of the state, what the walk needs;
`kda_prefill_scan` walks a request's chunks with a strip of the state in registers. Convolution and
gates before them and the gated norm after them are elementwise and stay with XLA. With G the log
decay summed over the chunk's rows, L and A as in kda_delta_pallas,
T = (I + diag(beta) L)^-1 diag(beta):

    W = T (K exp(G)),  U0 = T V,  Kd = K exp(G_C - G);   U = U0 - W S,  O = (Q exp(G)) S + A U,
    S <- diag(exp(G_C)) S + Kd^T U.

Operands of the products are bf16, sums float32 (the inverse in tf32 on NVIDIA).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kda_common import (
    KdaInputs,
    gated_output,
    nonfinite_requests,
    recurrence_inputs,
    replay,
    resolve_slots,
    window_at,
)
from pallas_kernels.kda_rows_pallas import read
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights

CHUNK = 64
# Pairs within a part share a reference row: exponents reach 8 rows x 5 = 40 either way.
PART = 16


@dataclass(frozen=True)
class PrefillTiles:
    """Static sizes: the strip of values a program of the walk keeps, and warps of both kernels."""

    strip: int
    chunk_warps: int
    scan_warps: int
    scan_stages: int


def prefill_tiles(value_dim: int) -> PrefillTiles:
    """16 values a strip: 8 programs a head, so 12 heads occupy 96 multiprocessors."""
    return PrefillTiles(strip=min(16, value_dim), chunk_warps=8, scan_warps=4, scan_stages=2)


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _inverse(pairs: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """(I + pairs)^-1 of a strictly lower triangular f32[C, C]: its diagonal parts, then the rest.

    The powers of a part vanish from PART on, those of the rest times the parts' inverse from
    C / PART = 4 on: both products of (I + P^(2^n)) are exact and their powers stay small.
    """
    same = row // PART == column // PART
    identity = jnp.where(row == column, 1.0, 0.0)
    power = jnp.where(same, pairs, 0.0)
    inner = identity - power
    for _ in range(PART.bit_length() - 2):
        power = _dot(power, power)
        inner += _dot(inner, power)
    rest = _dot(inner, jnp.where(same, 0.0, pairs))
    outer = identity - rest
    outer += _dot(outer, _dot(rest, rest))
    return _dot(outer, inner)


def _chunk_kernel(
    query,  # bf16[B, T, H, K]
    key,  # bf16[B, T, H, K]
    value,  # bf16[B, T, H, V]
    decay,  # f32[B, T, H, K]
    beta,  # f32[B, T, H]
    weight_ref,  # bf16[B, H, T, K] W
    update_ref,  # bf16[B, H, T, V] U0
    query_ref,  # bf16[B, H, T, K] Q exp(G)
    key_ref,  # bf16[B, H, T, K] Kd
    mix_ref,  # bf16[B, H, T, C] A
    total_ref,  # f32[B, H, N, K] G_C
):
    chunk, head, request = (pl.program_id(axis) for axis in range(3))
    key_dim, value_dim = query.shape[3], value.shape[3]
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    column = lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)
    lane = lax.broadcasted_iota(jnp.int32, (1, key_dim), 1)
    value_lane = lax.broadcasted_iota(jnp.int32, (1, value_dim), 1)
    time = chunk * CHUNK + row
    queries = read(query, (request, time, head, lane))
    keys = read(key, (request, time, head, lane))
    sums = lax.cumsum(read(decay, (request, time, head, lane)), axis=0)
    rate = read(beta, (request, time, head))
    key_pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    query_pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for part in range(CHUNK // PART):
        middle = jnp.sum(jnp.where(row == part * PART + PART // 2, sums, 0.0), axis=0)[None, :]
        here = row // PART == part
        grown = jnp.exp(jnp.where(here, sums - middle, 0.0))
        shrunk = jnp.exp(jnp.where(row < (part + 1) * PART, middle - sums, 0.0))
        right = _narrow(keys * shrunk)
        key_pairs += _dot(_narrow(jnp.where(here, keys * grown, 0.0)), right, (1, 1))
        query_pairs += _dot(_narrow(jnp.where(here, queries * grown, 0.0)), right, (1, 1))
    inverse = _inverse(rate * jnp.where(column < row, key_pairs, 0.0), row, column)
    inverse = _narrow(inverse)
    total = jnp.sum(jnp.where(row == CHUNK - 1, sums, 0.0), axis=0)
    grown = jnp.exp(sums)
    values = read(value, (request, time, head, value_lane))
    at, value_at = (request, head, time, lane), (request, head, time, value_lane)
    launch.store(weight_ref.at[at], _narrow(_dot(inverse, _narrow(rate * keys * grown))))
    launch.store(update_ref.at[value_at], _narrow(_dot(inverse, _narrow(rate * values))))
    launch.store(query_ref.at[at], _narrow(queries * grown))
    launch.store(key_ref.at[at], _narrow(keys * jnp.exp(total[None, :] - sums)))
    mix = _narrow(jnp.where(column <= row, query_pairs, 0.0))
    launch.store(mix_ref.at[request, head, time, column], mix)
    launch.store(total_ref.at[request, head, chunk, lane], total[None, :])


def _scan_kernel(
    weight,  # bf16[B, H, T, K]
    update,  # bf16[B, H, T, V]
    query,  # bf16[B, H, T, K]
    key,  # bf16[B, H, T, K]
    mix,  # bf16[B, H, T, C]
    total,  # f32[B, H, N, K]
    start,  # f32[B, H, K, V]
    lengths,  # i32[B]
    out_ref,  # f32[B, T, H, V]
    state_ref,  # f32[B, H, K, V]
    *,
    strip: int,
):
    head, request = pl.program_id(1), pl.program_id(2)
    first = pl.program_id(0) * strip
    state = start[request, head, :, pl.ds(first, strip)]

    def walk(chunk, state):
        rows = pl.ds(chunk * CHUNK, CHUNK)
        held = _narrow(state)
        delta = update[request, head, rows, pl.ds(first, strip)].astype(jnp.float32)
        delta = _narrow(delta - _dot(weight[request, head, rows, :], held))
        out = _dot(query[request, head, rows, :], held)
        out += _dot(mix[request, head, rows, :], delta)
        out_ref[request, rows, head, pl.ds(first, strip)] = out
        shrunk = jnp.exp(total[request, head, chunk, :])[:, None]
        return state * shrunk + _dot(key[request, head, rows, :], delta, (0, 0))

    chunks = (lengths[request] + CHUNK - 1) // CHUNK
    state_ref[request, head, :, pl.ds(first, strip)] = lax.fori_loop(0, chunks, walk, state)


def chunked_delta(
    inputs: KdaInputs, state: jax.Array, lengths: jax.Array, tiles: PrefillTiles, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Run rows of any number from `state` f32[B, H, K, V]: (o f32[B, T, H, V], state).

    Rows beyond `lengths` carry zero beta and decay. o beyond the last chunk of a request is
    undefined.
    """
    batch, length, heads, key_dim = inputs.key.shape
    value_dim = inputs.value.shape[3]
    padding = ((0, 0), (0, -length % CHUNK), (0, 0), (0, 0))
    narrow = (inputs.query, inputs.key, inputs.value)
    rows = [jnp.pad(leaf.astype(jnp.bfloat16), padding) for leaf in narrow]
    rows += [jnp.pad(inputs.decay, padding), jnp.pad(inputs.beta, padding[:3])]
    whole = length + padding[1][1]
    chunks = whole // CHUNK
    shape = jax.ShapeDtypeStruct
    head_rows = partial(shape, dtype=jnp.bfloat16)
    parts = launch.launch(
        _chunk_kernel,
        *rows,
        name="kda_prefill_chunk",
        grid=(chunks, heads, batch),
        out_shape=(
            head_rows((batch, heads, whole, key_dim)),
            head_rows((batch, heads, whole, value_dim)),
            head_rows((batch, heads, whole, key_dim)),
            head_rows((batch, heads, whole, key_dim)),
            head_rows((batch, heads, whole, CHUNK)),
            shape((batch, heads, chunks, key_dim), jnp.float32),
        ),
        interpret=interpret,
        num_warps=tiles.chunk_warps,
    )
    out, state = launch.launch(
        partial(_scan_kernel, strip=tiles.strip),
        *parts,
        state,
        lengths,
        name="kda_prefill_scan",
        grid=(value_dim // tiles.strip, heads, batch),
        out_shape=(
            shape((batch, whole, heads, value_dim), jnp.float32),
            shape(state.shape, jnp.float32),
        ),
        interpret=interpret,
        num_warps=tiles.scan_warps,
        num_stages=tiles.scan_stages,
    )
    return out[:, :length], state


def kda_prefill_pallas(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    fresh: jax.Array,  # bool[B]
    *,
    lengths: jax.Array,  # i32[B]
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
    tiles: PrefillTiles | None = None,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_prefill`."""
    if lower_bound is None or lower_bound < -5.0 or rows.qkv.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"kda_prefill's kernel needs bf16 rows and a decay bounded by -5, not "
            f"{rows.qkv.dtype} and {lower_bound}: use impl='reference'"
        )
    slots, live, health = resolve_slots(slots, cache.state.shape[0])
    lengths = jnp.where(live, jnp.clip(lengths, 0, rows.qkv.shape[1]), 0)
    window, state = replay(cache, slots, jnp.where(live & ~fresh, accepted, 0))
    window = jnp.where(fresh[:, None, None], 0, window)
    state = jnp.where(fresh[:, None, None, None], 0, state)
    valid = jnp.arange(rows.qkv.shape[1])[None] < lengths[:, None]
    clean = jax.tree.map(lambda leaf: jnp.where(valid[..., None], leaf, 0), rows)
    inputs = recurrence_inputs(clean, window, weights, lower_bound)
    inputs = dataclasses.replace(
        inputs,
        decay=jnp.where(valid[..., None, None], inputs.decay, 0.0),
        beta=jnp.where(valid[..., None], inputs.beta, 0.0),
    )
    tiles = prefill_tiles(weights.o_norm.shape[0]) if tiles is None else tiles
    out, state = chunked_delta(inputs, state, lengths, tiles, interpret)
    out = gated_output(out, clean.gate, weights.o_norm, norm_eps)
    out = jnp.where(valid[..., None], out, 0)
    window = window_at(jnp.concatenate([window, rows.qkv], axis=1), lengths, window.shape[1])
    cache = KdaCache(
        conv=cache.conv.at[slots].set(window),
        state=cache.state.at[slots].set(state),
        pending=cache.pending,
    )
    return out, cache, nonfinite_requests(out, live), health
