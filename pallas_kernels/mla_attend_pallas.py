"""The inner kernel of latent attention, shared by decode and prefill.

A program owns a tile of query vectors of one request, (row, head) pairs flattened, and a range of
cached positions. A cached row is read once from memory and serves as key (all of it) and as value
(its first L columns), so the tile streams positions through two chained products with an online
softmax between them (FlashAttention, arXiv 2205.14135; absorbed MLA, arXiv 2405.04434).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.health import BIT_PAGE

BIT_NONFINITE = 1 << 16  # of the words the kernels return; no bit of the health word
DOT_SIDE = 16  # the smallest side of a matrix product
NOTHING = -1e30  # the running maximum before the first score: finite, so that differences are


@dataclass(frozen=True)
class AttendTiles:
    """Static sizes of a launch."""

    queries: int  # query vectors of a program
    positions: int  # cached rows of one iteration
    columns: int  # latent columns of one product: a divisor of the padded latent
    warps: int
    stages: int
    # Triton spreads the warps of a product that it sees feed another one over rows alone, and with
    # 64 rows half of 8 warps repeat the others' work. It does not look through a branch.
    guarded: bool = False
    transposed: bool = False  # positions, and columns, go on the rows of the products
    reload: bool = False  # read the queries anew in each iteration


class Shapes(NamedTuple):
    """The static sizes of the operands."""

    batch: int
    rows: int
    heads: int
    latent: int
    rope: int
    pages: int
    page: int
    max_pages: int

    @property
    def vectors(self) -> int:
        return self.rows * self.heads

    @property
    def capacity(self) -> int:
        return self.max_pages * self.page


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def shapes_of(q: jax.Array, pages: jax.Array, page_table: jax.Array, latent: int) -> Shapes:
    """Read the sizes off the operands of an op."""
    batch, rows, heads, width = q.shape
    count, page, _ = pages.shape
    return Shapes(batch, rows, heads, latent, width - latent, count, page, page_table.shape[1])


def attend_tiles(vectors: int, latent: int, *, exact: bool, platform: str) -> AttendTiles:
    """Choose the tile for requests of `vectors` query vectors."""
    padded = max(power_of_two(latent), DOT_SIDE)
    side = max(power_of_two(vectors), DOT_SIDE)
    if exact:
        # float32 products run on the vector units, unrolled: narrow ones, or registers run out.
        warps = 8 if platform == "cuda" else 4  # as many threads: a wave has 64
        return AttendTiles(DOT_SIDE, 16, min(padded, 64), warps=warps, stages=1, reload=True)
    queries = min(side, 64)
    if platform == "cuda" and queries == 64:
        # 64 x 512 accumulators fill half the registers of a multiprocessor, held by 8 warps; two
        # tiles of 64 cached rows, the queries and the weights fill its shared memory.
        return AttendTiles(64, 64, padded, warps=8, stages=2, guarded=True)
    if platform == "cuda":
        # Bytes bound: the deepest pipeline of cached rows that shared memory holds.
        return AttendTiles(queries, 64, padded, warps=8, stages=3)
    # One tile of 32 cached rows fits the 64 KiB of LDS of a gfx942, and queries stay in registers.
    queries = min(queries, 32)
    # 16 vectors take half the matrix instructions, and registers, as columns.
    return AttendTiles(queries, 32, padded, warps=4, stages=2, transposed=queries == 16)


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def load(ref: Any, index: tuple, mask: jax.Array | None) -> jax.Array:
    """Load ref[index]; masked elements are zero and are not touched."""
    if mask is None:
        return launch.load(ref.at[index])
    return launch.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def count_true(mask: jax.Array) -> jax.Array:
    """How many elements are true, as f32[]."""
    return jnp.sum(jnp.where(mask, 1.0, 0.0))


def bit(condition: jax.Array, value: int) -> jax.Array:
    """`value` if the condition bool[] holds, else 0: i32[].

    Not jnp.where: of two literals and a scalar, Pallas makes a select between booleans.
    """
    return condition.astype(jnp.int32) * value


class _Columns(NamedTuple):
    """One slice of the columns of a cached row: its lanes, and which exist."""

    lane: jax.Array  # i32[1, C]
    valid: jax.Array | None  # bool[1, C], None if all do
    value: bool  # of the latent, which is the value too


def _column_slices(shapes: Shapes, columns: int) -> list[_Columns]:
    slices = []
    for start, width, step in (
        (0, shapes.latent, columns),
        (shapes.latent, shapes.rope, max(power_of_two(max(shapes.rope, 1)), DOT_SIDE)),
    ):
        for offset in range(0, width, step):
            lane = lax.broadcasted_iota(jnp.int32, (1, step), 1) + offset
            valid = lane < width if offset + step > width else None
            slices.append(_Columns(lane + start, valid, start == 0))
    return slices


def _both(mask: jax.Array, other: jax.Array | None) -> jax.Array:
    return mask if other is None else mask & other


class Place(NamedTuple):
    """What a program works on."""

    request: jax.Array  # i32[]
    vector: jax.Array  # i32[M] query vectors
    seen: jax.Array  # i32[M] positions each sees
    begin: jax.Array  # i32[] the range of positions
    common: jax.Array  # i32[] the positions below it are seen by every vector that sees any
    stop: jax.Array  # i32[]


def place_of(base_ref, valid_ref, shapes: Shapes, tiles: AttendTiles, splits: int, at) -> Place:
    """The part of program `at` = (tile, split, request), an even share of what its tile sees.

    base_ref i32[B] is the position of row 0 of each request, valid_ref i32[B] its rows.
    """
    tile, split, request = at
    base, valid = base_ref[request], jnp.minimum(valid_ref[request], shapes.rows)
    first = tile * tiles.queries
    vector = first + jnp.arange(tiles.queries, dtype=jnp.int32)
    row = lax.div(vector, jnp.int32(shapes.heads))
    seen = jnp.clip(jnp.where(row < valid, base + row + 1, 0), 0, shapes.capacity)
    seen_first = base + lax.div(first, jnp.int32(shapes.heads)) + 1
    last = lax.div(first + (tiles.queries - 1), jnp.int32(shapes.heads))
    end = base + jnp.minimum(last + 1, valid)
    end = jnp.where(lax.div(first, jnp.int32(shapes.heads)) < valid, end, 0)
    end = jnp.clip(end, 0, shapes.capacity)
    steps = lax.div(end + (tiles.positions - 1), jnp.int32(tiles.positions))

    def start(split):
        """Rounded up, so that the last range, with positions that not all see, has fewest."""
        share = lax.div(split * steps + (splits - 1), jnp.int32(splits))
        return jnp.minimum(share * tiles.positions, end)

    begin, stop = start(split), start(split + 1)
    return Place(request, vector, seen, begin, jnp.minimum(seen_first, stop), stop)


class _Pages(NamedTuple):
    """Reads page ids: one for all positions of an iteration if a page holds them, else one each."""

    table: Any  # i32[B, max_pages]
    place: Place
    shapes: Shapes
    positions: int

    def inside(self, index: jax.Array, whole: bool) -> jax.Array:
        """Rows within their pages of iteration `index`: i32[N].

        Unless the iteration is `whole`, the last row of the range stands in for those beyond it,
        cheaper than a mask on every load.
        """
        first, page = self.place.begin + index * self.positions, jnp.int32(self.shapes.page)
        offset = jnp.arange(self.positions, dtype=jnp.int32)
        if not whole:
            offset = jnp.minimum(offset, self.place.stop - 1 - first)
        if self.shapes.page % self.positions == 0:
            return lax.rem(first, page) + offset
        return lax.rem(first + offset, page)

    def load(self, index: jax.Array) -> jax.Array:
        """Page ids of iteration `index`: i32[] or i32[N]; 0 where there is none."""
        first = self.place.begin + index * self.positions
        if self.shapes.page % self.positions == 0:
            entry = lax.div(first, jnp.int32(self.shapes.page))
            found = self.table[self.place.request, jnp.minimum(entry, self.shapes.max_pages - 1)]
            return jnp.where(first < self.place.stop, found, 0)
        position = first + jnp.arange(self.positions, dtype=jnp.int32)
        position = jnp.minimum(position, self.place.stop - 1)
        entry = lax.div(position, jnp.int32(self.shapes.page))
        return load(self.table, (self.place.request, entry), first < self.place.stop)


def attend(q_ref, pages_ref, table_ref, place: Place, shapes: Shapes, tiles: AttendTiles, scale):
    """Attend from the tile's queries to its range of positions.

    q_ref [B, T*H, L+R], pages_ref [P, page, L+R]. Returns (out: tuple of f32[M, C], normalized;
    top f32[M], total f32[M] of the softmax in powers of two; word i32[]).
    """
    slices = _column_slices(shapes, tiles.columns)

    def read_queries(index):
        # Padded vectors read the last one. The index keeps the compiler from lifting the loads
        # out of the loop, where the queries in float32 would not fit the registers.
        last = jnp.minimum(jnp.int32(shapes.vectors - 1), shapes.vectors + index)
        vector = jnp.minimum(place.vector, last)[:, None]
        return [load(q_ref, (place.request, vector, cut.lane), cut.valid) for cut in slices]

    queries = read_queries(jnp.int32(0))
    axis = 0 if tiles.transposed else 1  # of the positions, or of the columns

    def wide(vector):
        return jnp.expand_dims(vector, axis)

    ids = _Pages(table_ref, place, shapes, tiles.positions)
    offset = jnp.arange(tiles.positions, dtype=jnp.int32)

    def body(whole, index, carry):
        accs, top, total, page, bad = carry
        position = place.begin + index * tiles.positions + offset
        wrong = (page < 0) | (page >= shapes.pages)
        page_here = jnp.where(wrong, 0, page)
        if page_here.ndim:
            page_here = page_here[:, None]
        inside = ids.inside(index, whole)[:, None]
        cached = [load(pages_ref, (page_here, inside, cut.lane), cut.valid) for cut in slices]
        lefts = read_queries(index) if tiles.reload else queries
        pairs = (
            zip(cached, lefts, strict=True) if tiles.transposed else zip(lefts, cached, strict=True)
        )
        scores = [_dot(left, right, (1, 1)) for left, right in pairs]
        values = cached[: len(accs)]
        if not whole:
            # A row that not every vector sees may hold NaN, which a weight of zero would not
            # silence; who sees it has it in the scores.
            values = [jnp.where(value * 0 == 0, value, 0) for value in values]

        def softmax(*scores):
            masked = sum(scores) * (scale * math.log2(math.e))
            if not whole:
                visible = jnp.expand_dims(position, 1 - axis) < wide(place.seen)
                masked = jnp.where(visible, masked, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(masked, axis=axis))
            weight = jnp.exp2(masked - wide(new_top))
            rescale = jnp.exp2(top - new_top)
            new_total = total * rescale + jnp.sum(weight, axis=axis)
            return weight.astype(pages_ref.dtype), rescale, new_top, new_total

        def never(*scores):
            return sum(scores).astype(pages_ref.dtype), top, top, total

        if tiles.guarded:
            here = place.begin + index * tiles.positions < place.stop  # always
            weight, rescale, new_top, new_total = lax.cond(here, softmax, never, *scores)
        else:
            weight, rescale, new_top, new_total = softmax(*scores)
        accs = tuple(
            acc * wide(rescale)
            + (_dot(value, weight, (0, 0)) if tiles.transposed else _dot(weight, value, (1, 0)))
            for acc, value in zip(accs, values, strict=True)
        )
        # The next ids are on their way while this iteration computes.
        return accs, new_top, new_total, ids.load(index + 1), bad | wrong.astype(jnp.int32)

    side = tiles.queries
    chunks = sum(cut.value for cut in slices)
    first_page = ids.load(jnp.int32(0))
    carry = (
        (jnp.zeros((tiles.columns, side)[:: 1 if tiles.transposed else -1], jnp.float32),) * chunks,
        jnp.full((side,), NOTHING, jnp.float32),
        jnp.zeros((side,), jnp.float32),
        first_page,
        first_page & 0,  # a branch cannot return a constant
    )
    steps = lax.div(place.stop - place.begin + (tiles.positions - 1), jnp.int32(tiles.positions))
    whole = jnp.maximum(lax.div(place.common - place.begin, jnp.int32(tiles.positions)), 0)

    def run(begin, stop, carry, whole):
        # A loop that might not run once makes NVIDIA's assembler wait for each matrix instruction
        # in turn (its note C7515).
        def loop(carry):
            return lax.fori_loop(begin, jnp.maximum(stop, begin + 1), partial(body, whole), carry)

        return lax.cond(begin < stop, loop, lambda same: same, carry)

    carry = run(0, whole, carry, True)
    accs, top, total, _, bad = run(whole, steps, carry, False)
    total = jnp.where(place.seen > 0, total, 0.0)
    inverse = wide(1.0 / jnp.where(total == 0.0, 1.0, total))
    out = tuple(jnp.where(wide(place.seen > 0), acc * inverse, 0.0) for acc in accs)
    infinite = jnp.zeros((), jnp.float32)
    for part in out:
        infinite += count_true(part * 0.0 != 0.0)
    wrong = count_true(bad > 0) if bad.ndim else bad.astype(jnp.float32)
    word = bit(infinite > 0, BIT_NONFINITE) | bit(wrong > 0, BIT_PAGE)
    return out, top, total, word


def store_vectors(ref, lead: tuple, place: Place, out, shapes: Shapes, tiles: AttendTiles) -> None:
    """Store the tile's vectors, as `attend` returns them, at ref[*lead, vector, :L]."""
    for part, cut in zip(out, _column_slices(shapes, tiles.columns), strict=False):
        lane, vector, valid = cut.lane, place.vector[:, None], cut.valid
        if tiles.transposed:
            lane, vector = lane.reshape(-1, 1), place.vector[None, :]
            valid = None if valid is None else valid.reshape(-1, 1)
        mask = _both(vector < shapes.vectors, valid)
        launch.store(ref.at[(*lead, vector, lane)], part.astype(ref.dtype), mask=mask)


def store_zeros(ref, lead: tuple, place: Place, shapes: Shapes, tiles: AttendTiles) -> None:
    """Store zeros for the tile's vectors at ref[*lead, vector, :L]."""
    shape = (tiles.queries, tiles.columns)[:: -1 if tiles.transposed else 1]
    chunks = -(-shapes.latent // tiles.columns)
    out = (jnp.zeros(shape, jnp.float32),) * chunks
    store_vectors(ref, lead, place, out, shapes, tiles)


def per_platform(make: Callable[[str], Callable[..., Any]], *args: jax.Array) -> Any:
    """`make(platform)(*args)` with the tile sizes of the platform it is lowered for."""
    return lax.platform_dependent(*args, cuda=make("cuda"), rocm=make("rocm"))
