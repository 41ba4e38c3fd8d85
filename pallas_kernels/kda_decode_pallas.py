"""KDA decode in Pallas: a program owns a strip of values of a head of a request.

It goes from the convolution to the gated norm and touches the state once. Lines of the state [V, K]
are independent given keys, queries and gates; what a head's strips share in the cache is read at
other ring rows than it is written, so programs need not wait for one another. The norm alone
crosses strips: with it a program has the whole head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.kda_common import resolve_slots
from pallas_kernels.kda_decode_block_pallas import BlockParts, apply_kernel, prepare_kernel
from pallas_kernels.kda_decode_steps_pallas import steps_kernel
from pallas_kernels.kda_math import Maths
from pallas_kernels.kda_types import KdaCache, KdaRows, KdaWeights
from pallas_kernels.norm import Unnormed

NAME = "kda_decode"
# The block's decays are referred to its start, so exponents reach lower_bound * rows; float32
# holds exp(+-80) with room for the keys.
STRONGEST_SUM = 80.0
DOT_ROWS = 16  # the fewest rows of a matrix product
# Without the norm, strips: as narrow as leaves no more programs than run at once.
BLOCK_STRIPS, BLOCK_PROGRAMS = (32, 64), 264
STEPS_STRIPS, STEPS_PROGRAMS = (16, 32), 264
STRIP_LINES = 4  # lines of the state that a warp keeps, where few programs run
HEAD_LINES = 8  # where many do, so that fewer warps make the same vectors


@dataclass(frozen=True)
class DecodeTiles:
    """Static sizes of the kernel, powers of two; `strip` values make a program."""

    form: Literal["steps", "block"]
    half: int  # rows of the block, at least DOT_ROWS / 2
    strip: int
    key: int
    warps: int


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _strip(value_dim: int, heads: int, choices: tuple[int, ...], programs: int) -> int:
    fitting = [size for size in choices if heads * -(-value_dim // size) <= programs]
    return min(_power_of_two(value_dim), (fitting or choices[-1:])[0])


def decode_tiles(
    new: int,
    dims: tuple[int, int],  # V, K
    *,
    heads: int,
    exact: bool,
    lower_bound: float | None,
    norm: bool,
) -> DecodeTiles:
    """Choose the form and the tile for `new` rows of `heads` heads, those of all requests.

    The norm needs the whole head in a program.
    """
    value_dim, key_dim = dims
    half = max(_power_of_two(new), DOT_ROWS // 2)
    bounded = lower_bound is not None and -lower_bound * half <= STRONGEST_SUM
    key, strip = _power_of_two(key_dim), _power_of_two(value_dim)
    if bounded and new > 1 and not exact:
        if not norm:
            strip = _strip(value_dim, heads, BLOCK_STRIPS, BLOCK_PROGRAMS)
        return DecodeTiles("block", half, strip, key, max(1, min(8, key * strip // 512)))
    if norm:
        lines = HEAD_LINES
    else:
        strip = _strip(value_dim, heads, STEPS_STRIPS, STEPS_PROGRAMS)
        lines = STRIP_LINES if strip <= STEPS_STRIPS[0] else HEAD_LINES
    # A warp has no more values than a line has lanes.
    return DecodeTiles("steps", half, strip, key, max(1, strip // lines, strip // key))


def _in_place(operands: tuple, cache: KdaCache, results: int) -> dict[int, int]:
    """Aliases of the cache, the last operand, with the results after the first `results`."""
    leaves, pools = len(jax.tree.leaves(operands)), len(jax.tree.leaves(cache))
    return {leaves - pools + pool: results + pool for pool in range(pools)}


def _block(
    operands: tuple,  # slots, starts, accepted, rows, weights
    cache: KdaCache,
    results: tuple,
    *,
    tiles: DecodeTiles,
    lower_bound: float | None,
    maths: Maths,
    lanes: int,
    interpret: bool,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, KdaCache]:
    """The block's two launches."""
    slots, starts, _, rows, weights = operands
    heads, value_dim, key_dim = cache.state.shape[1:]
    lead = (rows.qkv.shape[0], heads, 2 * tiles.half)
    shape: Any = jax.ShapeDtypeStruct
    parts = BlockParts(
        left=shape((*lead, key_dim), jnp.float32),
        offset=shape((*lead, value_dim), jnp.float32),
    )
    first = (slots, starts, rows, weights, cache)
    parts, cache = launch.launch(
        partial(
            prepare_kernel,
            half=tiles.half,
            value_tile=_power_of_two(value_dim),
            key_tile=tiles.key,
            lower_bound=lower_bound,
            maths=maths,
        ),
        *first,
        name=f"{NAME}_prepare",
        grid=(1, heads, lead[0]),
        out_shape=(parts, results[-1]),
        interpret=interpret,
        num_warps=max(1, tiles.key // lanes),
        aliases=_in_place(first, cache, len(jax.tree.leaves(parts))),
    )
    given = (*operands, parts, cache)
    return launch.launch(
        partial(apply_kernel, strip=tiles.strip, key_tile=tiles.key, maths=maths, **options),
        *given,
        name=NAME,
        grid=(results[2].shape[2], heads, lead[0]),
        out_shape=results,
        interpret=interpret,
        num_warps=tiles.warps,
        aliases=_in_place(given, cache, 3),
    )


def _steps(
    operands: tuple,  # slots, starts, accepted, rows, weights
    cache: KdaCache,
    results: tuple,
    *,
    tiles: DecodeTiles,
    interpret: bool,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, KdaCache]:
    """The one launch of the other form."""
    batch, heads, strips = results[2].shape
    kernel = partial(
        steps_kernel,
        warps=tiles.warps,
        strip=tiles.strip,
        key_tile=tiles.key,
        interpret=interpret,
        **options,
    )
    return launch.launch(
        kernel,
        *operands,
        cache,
        name=NAME,
        grid=(strips, heads, batch),
        out_shape=results,
        interpret=interpret,
        num_warps=tiles.warps,
        aliases=_in_place((*operands, cache), cache, 3),
    )


def kda_decode_pallas(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    slots: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    accepted: jax.Array,  # i32[B]
    *,
    lower_bound: float | None,
    norm_eps: float,
    norm: bool,
    interpret: bool,
    tiles: DecodeTiles | None = None,
) -> tuple[jax.Array | Unnormed, KdaCache, jax.Array, jax.Array]:
    """See `pallas_kernels.kda_decode`."""
    batch, new, _ = rows.qkv.shape
    heads, value_dim, key_dim = cache.state.shape[1:]
    exact = rows.qkv.dtype == jnp.float32
    slots, _, health = resolve_slots(slots, cache.state.shape[0])
    if tiles is None:
        dims = (value_dim, key_dim)
        tiles = decode_tiles(
            new, dims, heads=batch * heads, exact=exact, lower_bound=lower_bound, norm=norm
        )
    shape = jax.ShapeDtypeStruct
    strips = -(-value_dim // tiles.strip)
    results = (
        shape(rows.gate.shape, rows.gate.dtype),
        shape((batch, new, heads, strips), jnp.float32),
        shape((batch, heads, strips), jnp.bool_),
        jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), cache),
    )
    options: dict[str, Any] = {
        "tiles": tiles,
        "lower_bound": lower_bound,
        "norm_eps": norm_eps if norm else None,
        "interpret": interpret,
    }

    def run(
        *operands: Any, maths: Maths, lanes: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, KdaCache]:
        given = (operands[:-1], operands[-1], results)
        if tiles.form == "block":
            return _block(*given, maths=maths, lanes=lanes, **options)
        return _steps(*given, maths=maths, lanes=lanes, **options)

    out, squares, broken, cache = launch.by_platform(
        *(slots, starts, accepted, rows, weights, cache),
        cuda=partial(run, maths=Maths(native=not exact), lanes=32),
        portable=partial(run, maths=Maths(native=False), lanes=64),
        interpret=interpret,
    )
    # Strip by strip: XLA fuses a reduction of a few heads with its neighbors, not of many strips.
    flags = jnp.any(reduce(or_, [broken[:, :, strip] for strip in range(strips)]), axis=1)
    return out if norm else Unnormed(out, squares), cache, flags, health
