"""Routed MXFP4 experts of a decode step on Triton: each chosen expert's weights are read once.

Both launches have a program per (row, choice) pair and tile of features. A pair whose expert an
earlier pair also names leaves at once; the others serve every row that chose their expert. The
first launch applies gate, up and activation, the second the down projection; their results lie by
pair, so the weighted sum over a row's choices has a fixed order, whatever the company.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.moe_types import Mxfp4Bank
from pallas_kernels.mxfp4 import GROUP, WORD, block_words
from pallas_kernels.mxfp4_pallas import decode, decode_cuda, scale_values

UP_NAME = "moe_mxfp4_up"
DOWN_NAME = "moe_mxfp4_down"
UNROLLED = 4  # blocks of the inner width: so few that all their loads can start at once
DOT_DEPTH = 16  # the least depth of a dot; narrower blocks are multiplied element by element


@dataclasses.dataclass(frozen=True)
class MoeTiles:
    """Tile sizes of the two launches; weights are the left operand, rows the narrow right one."""

    rows: int  # rows that a program serves at once
    inner: int  # gate and as many up features of one program
    inner_warps: int
    inner_stages: int
    columns: int  # output columns of one program
    column_warps: int
    column_stages: int


def moe_tiles(pairs: int, rows: int, latent: int, inner: int, *, exact: bool) -> MoeTiles:
    """Choose tiles for `rows` rows of `pairs` choices; `exact`: float32 products.

    Measured in benchmarks/RESULTS.md.
    """
    narrow, columns = min(32, inner & -inner), min(32, latent & -latent)
    if exact:
        return MoeTiles(16, min(16, narrow), 4, 1, min(16, columns), 4, 1)
    if rows > 8:
        return MoeTiles(16, min(64, inner & -inner), 4, 3, columns, 1, 1)
    stages = 5 if pairs <= 32 else 2  # few programs: each keeps more in flight
    return MoeTiles(8, narrow, 2, stages, columns, 1, 1)


def moe_mxfp4_pallas(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    bank: Mxfp4Bank,
    *,
    activation: Activation,
    interpret: bool,
    tiles: MoeTiles | None = None,
) -> jax.Array:
    """See `pallas_kernels.moe_mxfp4`; W at most MOST_ROWS."""
    rows, latent = z.shape
    inner = bank.w2.shape[2] * WORD
    tiles = tiles or moe_tiles(experts.size, rows, latent, inner, exact=z.dtype == jnp.float32)
    operands = (z, experts, weights, bank.w13, bank.w13_scale, bank.w2, bank.w2_scale)
    run = functools.partial(_run, activation=activation, interpret=interpret)
    portable = functools.partial(
        run,
        decoder=decode,
        # AMD's matrix unit has no side of 8, and its pipeline holds one step ahead.
        tiles=dataclasses.replace(
            tiles, rows=max(16, tiles.rows), inner_stages=min(2, tiles.inner_stages)
        ),
    )
    return launch.by_platform(
        *operands,
        cuda=functools.partial(run, decoder=decode_cuda, tiles=tiles),
        portable=portable,
        interpret=interpret,
    )


def _run(
    z, experts, weights, w13, w13_scale, w2, w2_scale, *, activation, interpret, tiles, decoder
):
    latent = z.shape[1]
    pairs, inner = experts.size, w2.shape[2] * WORD
    hidden = launch.launch(
        functools.partial(_up_kernel, activation=activation, decoder=decoder, tiles=tiles),
        experts,
        z,
        w13,
        w13_scale,
        name=UP_NAME,
        grid=(pairs, inner // tiles.inner),
        out_shape=jax.ShapeDtypeStruct((pairs, inner), z.dtype),
        interpret=interpret,
        num_warps=tiles.inner_warps,
        num_stages=tiles.inner_stages,
    )
    parts = launch.launch(
        functools.partial(_down_kernel, decoder=decoder, tiles=tiles),
        experts,
        hidden,
        w2,
        w2_scale,
        name=DOWN_NAME,
        grid=(pairs, latent // tiles.columns),
        out_shape=jax.ShapeDtypeStruct((pairs, latent), jnp.float32),
        interpret=interpret,
        num_warps=tiles.column_warps,
        num_stages=tiles.column_stages,
    )
    # What no program wrote may hold anything.
    valid = ((experts >= 0) & (experts < w13.shape[0]))[:, :, None]
    parts = jnp.where(valid, parts.reshape(*experts.shape, latent), 0.0)
    return jnp.sum(parts * weights[:, :, None], axis=1)


def _product(weight, scale, x):
    """Codes [n, b] of one scale f32[n] a row, by x[R, b] -> f32[n, R].

    Scaling the sums instead of the codes costs nothing: they are added up in any case.
    """
    if x.shape[1] < DOT_DEPTH:
        wide = weight.astype(jnp.float32)[:, None, :] * x.astype(jnp.float32)[None, :, :]
        return jnp.sum(wide, axis=2) * scale[:, None]
    sums = lax.dot_general(
        weight,
        x,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return sums * scale[:, None]


def _load_scales(scale_ref, expert, feature, block, width):
    """The scales of one block of 8 * `width` columns: a f32[n] for each group of 32."""
    groups = WORD * width // GROUP
    return [
        scale_values(
            launch.load(scale_ref.at[launch.mesh(expert, feature, block * groups + group)])
        )
        for group in range(groups)
    ]


def _rows_of_expert(experts_ref, expert_count, body, slots):
    """Run `body(expert, row i32[R], pair i32[R])` for the rows that chose this program's expert.

    Only the first pair of an expert does; `pair` is W * J or more in unused places. Rows beyond
    R come in further calls, which read the weights again.
    """
    rows, choices = experts_ref.shape
    pairs, pair = rows * choices, pl.program_id(0)
    expert = experts_ref[pair // choices, pair % choices]
    row = jnp.arange(pl.next_power_of_2(rows), dtype=jnp.int32)
    choice = jnp.arange(pl.next_power_of_2(choices), dtype=jnp.int32)
    inside = (row < rows)[:, None] & (choice < choices)[None, :]
    at = launch.mesh(jnp.minimum(row, rows - 1), jnp.minimum(choice, choices - 1))
    same = inside & (launch.load(experts_ref.at[at]) == expert)
    own = jnp.min(jnp.where(same, row[:, None] * choices + choice[None, :], pairs), axis=1)
    slot = jnp.arange(slots, dtype=jnp.int32)

    @pl.when((jnp.min(own) == pair) & (expert >= 0) & (expert < expert_count))
    def _():
        mine = (own < pairs).astype(jnp.int32)
        rank = jnp.where(own < pairs, jnp.cumsum(mine) - 1, -1)

        def serve(chunk, carry):
            hit = rank[None, :] == (chunk * slots + slot)[:, None]
            taken = jnp.min(jnp.where(hit, own[None, :], pairs), axis=1)
            body(expert, jnp.minimum(taken // choices, rows - 1), taken)
            return carry

        if rows <= slots:
            serve(0, 0)
        else:
            lax.fori_loop(0, (jnp.sum(mine) + slots - 1) // slots, serve, 0)


def _up_kernel(
    experts_ref,  # i32[W, J]
    z_ref,  # [W, Z]
    w13_ref,  # u32[E, 2I, Z/8]
    scale_ref,  # u8[E, 2I, Z/32]
    hidden_ref,  # out [W * J, I]
    *,
    activation: Activation,
    decoder,
    tiles: MoeTiles,
):
    expert_count, features, words_count = w13_ref.shape
    inner, pairs = features // 2, hidden_ref.shape[0]
    feature = pl.program_id(1) * tiles.inner + jnp.arange(tiles.inner, dtype=jnp.int32)
    width = block_words(words_count)
    word = jnp.arange(width, dtype=jnp.int32)

    def body(expert, row, pair):
        def step(block, carry):
            gate, up = carry
            at = block * width + word
            gate_words = launch.load(w13_ref.at[launch.mesh(expert, feature, at)])
            up_words = launch.load(w13_ref.at[launch.mesh(expert, feature + inner, at)])
            gate_scales = _load_scales(scale_ref, expert, feature, block, width)
            up_scales = _load_scales(scale_ref, expert, feature + inner, block, width)
            for nibble in range(WORD):
                start = (block * WORD + nibble) * width
                x = launch.load(z_ref.at[launch.mesh(row, start + word)])
                group = nibble * width // GROUP
                gate += _product(decoder(gate_words, nibble, x.dtype), gate_scales[group], x)
                up += _product(decoder(up_words, nibble, x.dtype), up_scales[group], x)
            return gate, up

        zeros = jnp.zeros((tiles.inner, tiles.rows), jnp.float32)
        gate, up = lax.fori_loop(0, words_count // width, step, (zeros, zeros))
        hidden = gated(activation, gate, up).astype(hidden_ref.dtype)
        at = (
            jnp.broadcast_to(pair[None, :], hidden.shape),
            jnp.broadcast_to(feature[:, None], hidden.shape),
        )
        launch.store(hidden_ref.at[at], hidden, mask=(pair < pairs)[None, :])

    _rows_of_expert(experts_ref, expert_count, body, tiles.rows)


def _down_kernel(
    experts_ref,  # i32[W, J]
    hidden_ref,  # [W * J, I]
    w2_ref,  # u32[E, Z, I/8]
    scale_ref,  # u8[E, Z, I/32]
    out_ref,  # out f32[W * J, Z]
    *,
    decoder,
    tiles: MoeTiles,
):
    expert_count, _, words_count = w2_ref.shape
    pairs = out_ref.shape[0]
    column = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    width = block_words(words_count)
    word = jnp.arange(width, dtype=jnp.int32)

    def body(expert, row, pair):
        del row
        at = jnp.minimum(pair, pairs - 1)
        mine = (pair < pairs)[:, None]

        def step(block, out):
            words = launch.load(w2_ref.at[launch.mesh(expert, column, block * width + word)])
            scales = _load_scales(scale_ref, expert, column, block, width)
            for nibble in range(WORD):
                start = (block * WORD + nibble) * width
                place = launch.mesh(at, start + word)
                x = launch.load(hidden_ref.at[place], mask=mine, other=0.0)
                group = nibble * width // GROUP
                out += _product(decoder(words, nibble, x.dtype), scales[group], x)
            return out

        out = jnp.zeros((tiles.columns, tiles.rows), jnp.float32)
        blocks = words_count // width
        if blocks <= UNROLLED:
            for block in range(blocks):
                out = step(block, out)
        else:
            out = lax.fori_loop(0, blocks, step, out)
        place = (
            jnp.broadcast_to(pair[None, :], out.shape),
            jnp.broadcast_to(column[:, None], out.shape),
        )
        launch.store(out_ref.at[place], out, mask=(pair < pairs)[None, :])

    _rows_of_expert(experts_ref, expert_count, body, tiles.rows)
