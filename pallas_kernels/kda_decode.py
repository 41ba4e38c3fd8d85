"""KDA decode: a few rows per request against the recurrent state, speculation included.

Source: Kimi Linear (arXiv 2510.26692); the recurrence is written out in kda_common.py.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.impl import Impl, require_impl
from pallas_kernels.kda_decode_pallas import kda_decode_pallas
from pallas_kernels.kda_decode_reference import kda_decode_reference
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights, most_rows
from pallas_kernels.norm import Unnormed


def kda_decode(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    *,
    lower_bound: float | None,
    norm_eps: float,
    norm: bool = True,
    impl: Impl,
) -> tuple[jax.Array | Unnormed, KdaCache, jax.Array, jax.Array]:
    """Replay each slot's accepted pending rows, then run its T new rows without committing them.

    The new rows stand at positions starts[b] and on, the replayed ones right before them. The
    replayed state is written once; the new rows become the pending rows of their positions, and
    the rest of the rings stays as it was. `accepted` is clamped to [0, most_rows]. A slot <= 0 is
    the null slot: it reads and writes slot 0 only, gives zeros and sets no flag; a slot >= S is
    treated as null and sets BIT_SLOT.

    Returns (out [B, T, H*V], cache, flags bool[B] of requests with a non-finite row, health u32[]).
    `out` is rms(o) * o_norm * sigmoid(gate) in the compute dtype; without `norm` it is `Unnormed`,
    which `linear` finishes, and V may be split among programs. Raises ValueError when T exceeds
    most_rows(cache).
    """
    require_impl("kda_decode", impl)
    most, new = most_rows(cache), rows.qkv.shape[1]
    if new > most:
        raise ValueError(f"kda_decode got {new} rows a request, the cache keeps {most}")
    run = kda_decode_reference
    if impl != "reference":
        run = functools.partial(kda_decode_pallas, interpret=impl == "interpret")
    return run(
        rows,
        weights,
        cache,
        slots,
        starts,
        accepted,
        lower_bound=lower_bound,
        norm_eps=norm_eps,
        norm=norm,
    )
