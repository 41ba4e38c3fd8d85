"""KDA decode as one Pallas kernel: a program owns a head of a request, from the convolution to the
gated norm, and touches the state once.

The replayed rows and the new rows form one block. In the form "wy" everything but the products
with the state is computed while the state is on its way, so the number of rows hardly changes the
time; those products run on the matrix units, with float32 operands rounded to tf32 on NVIDIA. In
float32 mode, and where the decay has no lower bound, the rows run one after another ("steps"); one
replayed and one new row have a closed form of their own ("pair").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.health import BIT_SLOT
from pallas_kernels.kda_decode_pair_pallas import pair_kernel
from pallas_kernels.kda_delta_pallas import Inputs, run_steps, run_wy
from pallas_kernels.kda_rows_pallas import (
    BIT_NONFINITE,
    Block,
    Convolution,
    Gates,
    l2_normalize,
    locate,
    moved_window,
    read_raw,
    report,
)
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights

NAME = "kda_decode"
# The block's decay is referred to the last replayed row, so exponents reach lower_bound * rows of
# one part; float32 holds exp(+-80) with room for the keys.
STRONGEST_SUM = 80.0
DOT_ROWS = 16  # the fewest rows of a matrix product


@dataclass(frozen=True)
class DecodeTiles:
    """Static sizes of the kernel: powers of two that cover the rows and the head."""

    form: Literal["wy", "steps", "pair"]
    first_new: int  # row of the block at which the new rows start
    rows: int  # rows of the block
    key: int
    value: int
    warps: int


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def decode_tiles(
    new: int, pending: int, key_dim: int, value_dim: int, *, exact: bool, lower_bound: float | None
) -> DecodeTiles:
    """Choose the form and the tile for `new` rows that follow up to `pending` replayed ones."""
    first_new, new = _power_of_two(pending), _power_of_two(new)
    rows = max(first_new, new) * 2
    bounded = lower_bound is not None and -lower_bound * max(first_new, new) <= STRONGEST_SUM
    form: Literal["wy", "steps", "pair"] = "wy" if bounded and not exact else "steps"
    if rows == 2:
        form = "pair"
    return DecodeTiles(
        form=form,
        first_new=first_new,
        rows=max(rows, DOT_ROWS) if form == "wy" else rows,
        key=_power_of_two(key_dim),
        value=_power_of_two(value_dim),
        # 64 registers a thread hold the 128 x 128 state.
        warps=max(1, min(8, _power_of_two(key_dim) * _power_of_two(value_dim) // 2048)),
    )


def _kernel(
    slots,  # i32[B]
    accepted,  # i32[B]
    rows,  # KdaRows
    weights,  # KdaWeights
    cache,  # KdaCache
    out_ref,  # [B, T, H*V]
    words,  # i32[B, H]
    after,  # KdaCache, the same memory as `cache`
    *,
    tiles: DecodeTiles,
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
):
    head, request = pl.program_id(0), pl.program_id(1)
    size, heads, key_dim, value_dim = cache.state.shape
    pending = cache.pending.beta.shape[1]
    given, slot, replayed = locate(slots, accepted, size, pending)
    block = Block(
        request=request,
        head=head,
        slot=slot,
        accepted=replayed,
        row=lax.broadcasted_iota(jnp.int32, (tiles.rows, 1), 0),
        first_new=tiles.first_new,
        new=rows.qkv.shape[1],
    )
    lane = lax.broadcasted_iota(jnp.int32, (1, tiles.key), 1)
    value_lane = lax.broadcasted_iota(jnp.int32, (1, tiles.value), 1)
    valid, value_valid = lane < key_dim, value_lane < value_dim
    key_row = lax.broadcasted_iota(jnp.int32, (tiles.key, 1), 0)
    state_at = (slot, head, key_row, value_lane)
    padded = (tiles.key, tiles.value) != (key_dim, value_dim)
    state_valid = (key_row < key_dim) & value_valid if padded else None
    columns = [
        (head * key_dim + lane, valid),
        (heads * key_dim + head * key_dim + lane, valid),
        (2 * heads * key_dim + head * value_dim + value_lane, value_valid),
    ]
    mixed = [Convolution(block, rows, weights, *at) for at in columns]
    gates = Gates(block, rows, weights, lane, value_lane, (key_dim, value_dim))
    for convolution in mixed:
        convolution.load_past(cache)
    # Summed before the state arrives: the taps and the state together do not fit the registers.
    query, key, value = (convolution.result() for convolution in mixed)
    state = read_raw(cache.state, state_at, state_valid)
    windows = [moved_window(block, cache, *at) for at in columns]
    is_new, is_old = block.is_new, block.is_old
    old_at = (slot, block.row, head)
    old_key = read_raw(cache.pending.key, (*old_at, lane), is_old & valid)
    old_value = read_raw(cache.pending.value, (*old_at, value_lane), is_old & value_valid)
    old_decay = read_raw(cache.pending.decay, (*old_at, lane), is_old & valid)
    old_beta = read_raw(cache.pending.beta, old_at, is_old)

    dtype = rows.qkv.dtype
    query = l2_normalize(query, axis=1) * key_dim**-0.5
    key = l2_normalize(key, axis=1).astype(dtype)
    value = value.astype(dtype)
    decay, beta = gates.decay(lower_bound), gates.beta()
    inputs = Inputs(
        query=query,
        key=jnp.where(is_new, key, old_key).astype(jnp.float32),
        value=jnp.where(is_new, value, old_value).astype(jnp.float32),
        decay=jnp.where(is_new & valid, decay, old_decay),
        beta=jnp.where(is_new, beta, old_beta),
    )

    if tiles.form == "wy":
        out, new_state = run_wy(
            inputs, state, block.row, tiles.first_new, max(tiles.first_new, block.new)
        )
    else:
        counts = (pending, tiles.first_new, block.new)
        out, new_state = run_steps(inputs, state, block.row, counts)
    mean = jnp.sum(jnp.where(value_valid, out * out, 0.0), axis=1, keepdims=True) / value_dim
    out *= lax.rsqrt(mean + norm_eps) * gates.scale()
    broken = jnp.sum(jnp.where(is_new & value_valid, out * 0.0, 0.0)) != 0.0

    if not interpret:
        launch.barrier()  # the pools change in place: every thread has read before one writes
    here, value_here = is_new & valid, is_new & value_valid
    out = jnp.where(slot > 0, out, 0.0).astype(out_ref.dtype)
    launch.store(out_ref.at[gates.gate_at], out, mask=value_here)
    words[request, head] = report(given, size, broken)
    launch.store(after.state.at[state_at], new_state, mask=state_valid)
    for (column, at_valid), convolution, (window_at, kept, window) in zip(
        columns, mixed, windows, strict=True
    ):
        launch.store(after.conv.at[window_at], window, mask=kept)
        raw_at = (slot, block.fresh, column)
        launch.store(after.pending.conv.at[raw_at], convolution.raw, mask=is_new & at_valid)
    new_at = (slot, block.fresh, head)
    launch.store(after.pending.key.at[*new_at, lane], key, mask=here)
    launch.store(after.pending.value.at[*new_at, value_lane], value, mask=value_here)
    launch.store(after.pending.decay.at[*new_at, lane], decay, mask=here)
    launch.store(after.pending.beta.at[new_at], beta, mask=is_new)


def kda_decode_pallas(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    *,
    lower_bound: float | None,
    norm_eps: float,
    interpret: bool,
    tiles: DecodeTiles | None = None,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_decode`."""
    batch, new, _ = rows.qkv.shape
    heads, key_dim, value_dim = cache.state.shape[1:]
    if tiles is None:
        tiles = decode_tiles(
            new,
            cache.pending.beta.shape[1],
            key_dim,
            value_dim,
            exact=rows.qkv.dtype == jnp.float32,
            lower_bound=lower_bound,
        )
    out_shape = (
        jax.ShapeDtypeStruct(rows.gate.shape, rows.gate.dtype),
        jax.ShapeDtypeStruct((batch, heads), jnp.int32),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cache),
    )
    operands = (slots, accepted, rows, weights, cache)
    leaves = len(jax.tree.leaves(operands))
    pools = len(jax.tree.leaves(cache))
    options: dict[str, Any] = {
        "lower_bound": lower_bound,
        "norm_eps": norm_eps,
        "interpret": interpret,
    }
    if tiles.form == "pair":
        kernel = partial(pair_kernel, tile=(tiles.key, tiles.value), **options)
    else:
        kernel = partial(_kernel, tiles=tiles, **options)
    out, words, cache = launch.launch(
        kernel,
        *operands,
        name=NAME,
        grid=(heads, batch),
        out_shape=out_shape,
        interpret=interpret,
        num_warps=tiles.warps,
        aliases={leaves - pools + pool: 2 + pool for pool in range(pools)},
    )
    flags = jnp.any((words & BIT_NONFINITE) != 0, axis=1)
    health = jnp.where(jnp.any((words & BIT_SLOT) != 0), BIT_SLOT, 0).astype(jnp.uint32)
    return out, cache, flags, health
