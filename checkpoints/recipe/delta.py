"""The KDA recurrence for training: all chunks at once, and two short scans over their states.

The equations are those of `pallas_kernels.kda_prefill`'s chunkwise form. What does not depend on
the state is computed for all chunks in parallel; the scans that are left take small products, and
have gradients. They are short since each step of a scan is a few launches, which would take longer
than all else: of 64 chunks, eight steps inside of groups, then eight over the groups. Rows of
several documents may share a chunk: no product reaches over a document's first row.

Decays between rows are products of two factors, exp(G_t - G_c) and exp(G_c - G_s), around the
chunk's middle row c: with a bounded gate neither leaves float32.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kda_common import KdaInputs
from pallas_kernels.kda_prefill_reference import unit_lower_inverse

CHUNK = 32
LARGEST_EXPONENT = 87.0  # of float32
UNROLL = 2  # chunks in a round of the scan: fewer launches of the loop itself


def check_bound(lower_bound: float | None) -> None:
    """ValueError unless the decays of half a chunk stay in float32."""
    if lower_bound is None or -lower_bound * CHUNK / 2 > LARGEST_EXPONENT:
        raise ValueError(
            f"training needs gate_lower_bound of {-2 * LARGEST_EXPONENT / CHUNK:g} or more, "
            f"got {lower_bound}"
        )


def delta_rule(
    inputs: KdaInputs, first: jax.Array, valid: jax.Array, precision: lax.Precision | None
) -> jax.Array:
    """o_t = S_t q_t of every row: f32[B, T, H, V]; T is a multiple of CHUNK.

    first: bool[B, T] rows that start a document, from a zero state. valid: bool[B, T]; the other
    rows leave the state as it is.
    """

    def einsum(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=precision)

    query, key, value, decay = (
        _chunks(leaf.astype(jnp.float32))
        for leaf in (inputs.query, inputs.key, inputs.value, inputs.decay)
    )  # [B, N, H, C, K]
    real = _chunks(valid[..., None, None])
    decay = jnp.where(real, decay, 0.0)
    beta = jnp.where(real, _chunks(inputs.beta[..., None]), 0.0)
    document = jnp.cumsum(_chunks(first[..., None, None].astype(jnp.int32)), axis=3)[..., 0]
    together = document[..., :, None] == document[..., None, :]  # [B, N, 1, C, C]
    goes_on = (document == 0)[..., None]  # what came before the chunk reaches the row
    is_last = (document == document[..., -1:])[..., None]  # the row reaches the chunk's end

    total = jnp.cumsum(decay, axis=3)
    middle = total - total[..., CHUNK // 2, None, :]
    source = key * jnp.exp(-middle)
    left = jnp.exp(middle)
    row, column = np.ogrid[:CHUNK, :CHUNK]
    pairs = einsum("bnhtk,bnhsk->bnhts", key * left, source)
    pairs = jnp.where(together & _wide(row > column), pairs, 0.0)
    seen = einsum("bnhtk,bnhsk->bnhts", query * left, source)
    seen = jnp.where(together & _wide(row >= column), seen, 0.0)
    inverse = unit_lower_inverse(beta * pairs)

    from_start = jnp.where(goes_on, jnp.exp(total), 0.0)
    to_end = jnp.where(is_last, jnp.exp(total[..., -1:, :] - total), 0.0) * key
    own = einsum("bnhts,bnhsv->bnhtv", inverse, beta * value)
    of_state = einsum("bnhts,bnhsk->bnhtk", inverse, beta * from_start * key)
    states = _states(own, of_state, to_end, from_start[..., -1, :], precision)
    updates = own - einsum("bnhtk,bnhvk->bnhtv", of_state, states)
    out = einsum("bnhtk,bnhvk->bnhtv", from_start * query, states)
    out = out + einsum("bnhts,bnhsv->bnhtv", seen, updates)
    return jnp.swapaxes(out, 2, 3).reshape(*valid.shape, out.shape[2], -1)


def _chunks(x: jax.Array) -> jax.Array:
    """[B, T, H, K] -> [B, N, H, C, K]."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 2, 3)


def _wide(mask: np.ndarray) -> np.ndarray:
    return mask[None, None, None]


def _states(
    own: jax.Array,  # f32[B, N, H, C, V] updates from a zero state
    of_state: jax.Array,  # f32[B, N, H, C, K] what the state before takes from them
    to_end: jax.Array,  # f32[B, N, H, C, K] keys as the chunk's end sees them
    kept: jax.Array,  # f32[B, N, H, K] decay of the whole chunk
    precision: lax.Precision | None,
) -> jax.Array:
    """The state before each chunk, f32[B, N, H, V, K].

    What a chunk makes of a state is affine in it. So groups of chunks run beside each other, from
    zero and from the unit matrix: both tell what becomes of any state before the group.
    """
    batch, count, heads, _, value = own.shape
    key = to_end.shape[-1]
    length = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    apart = (batch, count // length, length)
    unit = jnp.eye(key, dtype=jnp.float32)

    def einsum(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=precision)

    matmul = partial(jnp.matmul, precision=precision)

    def advance(carry, chunk):
        state, decay = carry  # [B, G, H, V + K, K] from zero, and from the unit matrix
        own, of_state, to_end, kept = chunk
        own = jnp.pad(own, [(0, 0)] * 4 + [(0, key)])
        update = own - einsum("bghtk,bghvk->bghtv", of_state, state)
        after = einsum("bghtv,bghtk->bghvk", update, to_end)
        return (state * kept[..., None, :] + after, decay * kept), carry

    def become(state, run):
        """A state [..., V, K] after a run of chunks; what only decays goes through no product."""
        rows, decay = run
        others = rows[..., value:, :] - decay[..., None, :] * unit[(None,) * (decay.ndim - 1)]
        return state * decay[..., None, :] + rows[..., :value, :] + matmul(state, others)

    start = jnp.concatenate([jnp.zeros((value, key), jnp.float32), unit])
    start = jnp.broadcast_to(start, (*apart[:2], heads, *start.shape))
    chunks = tuple(
        jnp.moveaxis(x.reshape(*apart, *x.shape[2:]), 2, 0) for x in (own, of_state, to_end, kept)
    )
    whole, parts = lax.scan(advance, (start, jnp.ones_like(chunks[3][0])), chunks, unroll=UNROLL)
    groups = tuple(jnp.moveaxis(x, 1, 0) for x in whole)
    empty = jnp.zeros((batch, heads, value, key), jnp.float32)
    _, before = lax.scan(lambda s, run: (become(s, run), s), empty, groups, unroll=UNROLL)
    states = become(jnp.moveaxis(before, 0, 1)[None], parts)  # [L, B, G, H, V, K]
    return jnp.moveaxis(states, 0, 2).reshape(batch, count, *states.shape[3:])
