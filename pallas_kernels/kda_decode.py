"""KDA decode: a few rows per request against the recurrent state, speculation included."""

from __future__ import annotations

import jax

from pallas_kernels.impl import Impl, require_impl
from pallas_kernels.kda_decode_pallas import kda_decode_pallas
from pallas_kernels.kda_decode_reference import kda_decode_reference
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights


def kda_decode(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    *,
    lower_bound: float | None,
    norm_eps: float,
    impl: Impl,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """Replay each slot's accepted pending rows, then run its T new rows without committing them.

    The replayed conv window and state are written once; the T rows become the new pending rows
    (pending rows at T and beyond are left as they were). `accepted` is clamped to [0, Q]. A slot
    <= 0 is the null slot: it reads and writes slot 0 only, gives zeros and sets no flag; a slot
    >= S is treated as null and sets BIT_SLOT.

    Returns (out [B, T, H*V] = rms(o) * o_norm * sigmoid(gate) in the compute dtype, cache, flags
    bool[B] of requests with a non-finite row, health u32[]). Raises ValueError when T exceeds Q.
    """
    require_impl("kda_decode", impl)
    pending_rows = cache.pending.beta.shape[1]
    if rows.qkv.shape[1] > pending_rows:
        raise ValueError(
            f"kda_decode got {rows.qkv.shape[1]} rows a request, the cache keeps {pending_rows}"
        )
    if impl == "reference":
        return kda_decode_reference(
            rows, weights, cache, slots, accepted, lower_bound=lower_bound, norm_eps=norm_eps
        )
    return kda_decode_pallas(
        rows,
        weights,
        cache,
        slots,
        accepted,
        lower_bound=lower_bound,
        norm_eps=norm_eps,
        interpret=impl == "interpret",
    )
