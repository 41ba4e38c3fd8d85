"""KDA prefill: a chunk of a prompt per request, in the chunkwise (WY) form.

Source: Kimi Linear (arXiv 2510.26692); the form is written out in kda_prefill_reference.py.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.impl import Impl, require_impl
from pallas_kernels.kda_prefill_pallas import kda_prefill_pallas
from pallas_kernels.kda_prefill_reference import kda_prefill_reference
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights


def kda_prefill(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    fresh: jax.Array,  # bool[B]
    *,
    lengths: jax.Array,  # i32[B]
    lower_bound: float | None,
    norm_eps: float,
    impl: Impl,
) -> tuple[jax.Array, KdaCache, jax.Array, jax.Array]:
    """Commit each slot's accepted pending rows, then run and commit lengths[b] new rows.

    They stand at positions starts[b] and on. A fresh request starts at 0, from a zero conv window
    and state whatever its slot held, and replays nothing. Rows at lengths[b] and beyond are
    padding: they may hold NaN, and their outputs are zero. Pending rows are left as they were: the
    caller sets the accepted counts to zero. Slots as in `kda_decode`.

    Returns (out [B, T, H*V], cache, flags bool[B], health u32[]) as `kda_decode` does. The kernels
    take every decay. Raises NotImplementedError when they are asked for rows other than bfloat16
    and float32, or for key or value widths that are no power of two from 16 on.
    """
    require_impl("kda_prefill", impl)
    run = kda_prefill_reference
    if impl != "reference":
        run = functools.partial(kda_prefill_pallas, interpret=impl == "interpret")
    return run(
        rows,
        weights,
        cache,
        slots,
        starts,
        accepted,
        fresh,
        lengths=lengths,
        lower_bound=lower_bound,
        norm_eps=norm_eps,
    )
