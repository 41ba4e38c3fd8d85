"""The stages of moe_mono, in the order of their tickets (see persistent.py).

Each hand-off is covered by a stage that does not need it: the choice of experts and the latent by
the shared experts' first matrix, the experts' inner features by the shared experts' second one.

  router         x to logits
  latent         x to z
  choose         logits to experts and their weights, a row an item
  shared up      x to the shared experts' inner features
  up             z to inner features of each chosen expert
  shared down    to the shared experts' sum
  down           to each (row, choice) pair's part; who finishes a tile of columns sums the parts

A matrix with few features for many programs is split along its columns too; who finishes a tile of
features adds the splits' sums. All sums have a fixed order. A program is one warp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.activation import Activation, gated
from pallas_kernels.linear_tile_pallas import gate_and_up
from pallas_kernels.linear_warp_pallas import products
from pallas_kernels.loops import sum_blocks
from pallas_kernels.moe_mono_tiles import (
    MonoTiles,
    Sizes,
    bad_mark,
    column_tile,
    counters,
    feature_tile,
    split_counts,
)
from pallas_kernels.moe_mxfp4_pallas import down_tile, up_tile
from pallas_kernels.mxfp4_pallas import Decoder, lift
from pallas_kernels.persistent import HEADER, Control, Stage
from pallas_kernels.route_pallas import top_k_row

SECTOR = 8  # words of 32 bits
FETCHED = 256  # sectors on their way at once
SUMMED = 4  # pieces of a sum that are loaded at once


@dataclasses.dataclass(frozen=True)
class Refs:
    """The arrays of a launch, in the order of the kernel's arguments."""

    before: Any  # the control words before; what the kernel changes is its output
    x: Any  # [W, D]
    live: Any  # i32[W]
    router: Any  # [E, D]
    bias: Any  # f32[E]
    latent_down: Any  # [Z, D]
    shared_up: Any  # [2S, D]
    shared_down: Any  # [D, S]
    w13: Any  # u32[E, 2I, Z/8], tiled
    w13_scale: Any  # u8[E, 2I, Z/32], joined
    w2: Any  # u32[E, Z, I/8], tiled
    w2_scale: Any  # u8[E, Z, I/32], joined
    w13_lines: Any  # w13 and w2 once more, to be brought nearer
    w2_lines: Any
    control: Any  # out i32[words]
    routed: Any  # out f32[W, Z]
    shared: Any  # out f32[W, D]
    experts: Any  # out i32[W, J]
    weights: Any  # out f32[W, J]
    logits: Any  # between f32[W, E]
    z: Any  # between [W, Z]
    inner: Any  # between [W, S]
    hidden: Any  # between [W * J, I]
    parts: Any  # between f32[W * J, Z]
    router_sums: Any  # between f32[splits, E, R]
    latent_sums: Any  # between f32[splits, Z, R]
    shared_sums: Any  # between f32[splits, 2S, R]
    unread: Any  # between i32[1]


@dataclasses.dataclass(frozen=True)
class SplitMatrix:
    """A matrix that multiplies x in splits; `finish` makes its results of the splits' sums."""

    weight: Any
    sums: Any
    out: Any
    splits: int
    tile_counters: int  # one for each tile of features
    counter: int  # of finished tiles
    finish: Callable[[jax.Array], jax.Array] = lambda sums: sums


class Items:
    """What the programs of one launch do, stage by stage."""

    def __init__(
        self,
        refs: Refs,
        control: Control,
        sizes: Sizes,
        tiles: MonoTiles,
        *,
        activation: Activation,
        decoder: Decoder,
        options: dict[str, Any],
    ):
        self.refs, self.control, self.sizes, self.tiles = refs, control, sizes, tiles
        self.activation, self.decoder, self.options = activation, decoder, options
        self.at = counters(sizes, tiles)
        self.row = jnp.arange(tiles.rows, dtype=jnp.int32)
        self.row_at = jnp.minimum(self.row, sizes.W - 1)
        self.pairs = sizes.W * sizes.J
        self.pair_tiles = sizes.I // tiles.experts.inner
        self.latent_tiles = sizes.Z // feature_tile(tiles, sizes.Z)
        self.counted = (self.row < sizes.W) & (launch.load(refs.live.at[self.row_at]) != 0)

    def stages(self) -> tuple[Stage, ...]:
        refs, at = self.refs, self.at
        router, latent, shared = split_counts(self.tiles, self.sizes.D)
        return (
            self.split(
                SplitMatrix(
                    refs.router, refs.router_sums, refs.logits, router, at.tiles[0], at.logits
                )
            ),
            self.split(
                SplitMatrix(
                    refs.latent_down,
                    refs.latent_sums,
                    refs.z,
                    latent,
                    at.tiles[1],
                    at.latent,
                    finish=self.latents,
                )
            ),
            Stage(self.sizes.W, self.choose),
            self.split(
                SplitMatrix(
                    refs.shared_up,
                    refs.shared_sums,
                    refs.inner,
                    shared,
                    at.tiles[2],
                    at.shared,
                    finish=lambda sums: gated(self.activation, *gate_and_up(sums)),
                )
            ),
            Stage(self.pairs * self.pair_tiles, self.up),
            Stage(self.sizes.D // feature_tile(self.tiles, self.sizes.D), self.shared_down),
            Stage(self.pairs * (self.sizes.Z // self.tiles.experts.columns), self.down),
        )

    def latents(self, sums):
        """Latents as the experts' products want them."""
        sums = sums.astype(self.refs.z.dtype)
        return lift(self.decoder, sums) if self.decoder.ready else sums

    def mark(self, out):
        """Note the rows of out f32[n, R] that are not finite."""
        bad = jnp.max((jnp.abs(out) < jnp.inf).astype(jnp.int32) ^ 1, axis=0)
        word = HEADER + self.at.bad + self.row_at
        value = jnp.broadcast_to(bad_mark(self.control.epoch + 1), self.row.shape)
        launch.store(self.refs.control.at[word], value, mask=self.counted & (bad != 0))

    def fetch(self, words_ref, pair, first, count):
        """Bring `count` rows of a pair's expert to the second-level cache: a word a sector."""
        choices = self.sizes.J
        expert = self.refs.experts[pair // choices, pair % choices]
        expert = jnp.clip(expert, 0, self.sizes.E - 1)
        sectors = pl.cdiv(words_ref.shape[2], SECTOR)
        step = jnp.arange(pl.next_power_of_2(sectors), dtype=jnp.int32)
        word = jnp.minimum(step, sectors - 1) * SECTOR
        chunk = min(count & -count, FETCHED // step.size)

        def some(index, seen):
            at = first + index * chunk + jnp.arange(chunk, dtype=jnp.int32)
            words = launch.load(words_ref.at[launch.mesh(expert, at, word)])
            return jnp.maximum(seen, lax.bitcast_convert_type(words, jnp.int32))

        none = jnp.zeros((chunk, step.size), jnp.int32)
        seen = lax.fori_loop(0, count // chunk, some, none)
        self.refs.unread[0] = jnp.max(seen)  # or nothing is loaded

    def split(self, matrix: SplitMatrix) -> Stage:
        """Stage of a matrix by x, in splits."""
        features, results = matrix.weight.shape[0], matrix.out.shape[1]
        tile = feature_tile(self.tiles, features)
        depth = column_tile(self.tiles, self.sizes.D)
        steps = self.sizes.D // depth // matrix.splits
        width = tile * results // features
        lane = jnp.arange(tile, dtype=jnp.int32)

        def run(item):
            piece, part = item // matrix.splits, item % matrix.splits
            # With an activation: features of the gate and the same ones of up.
            feature = piece * width + lane % width + lane // width * results
            place = piece * tile + lane
            sums = products(
                self.refs.x, matrix.weight, self.row_at, feature, part * steps, steps, depth
            )
            launch.store(matrix.sums.at[launch.mesh(part, place, self.row)], sums)

            @pl.when(self.control.publish_last(matrix.tile_counters + piece, matrix.splits))
            def _():
                def load(each):
                    sums = launch.load(matrix.sums.at[launch.mesh(each, place, self.row)])
                    return lambda: sums

                start = jnp.zeros((tile, self.row.size), jnp.float32)
                out = matrix.finish(sum_blocks(load, matrix.splits, SUMMED, start))
                column = piece * width + jnp.arange(width, dtype=jnp.int32)
                store_columns(matrix.out, out, self.row, column)
                self.control.publish(matrix.counter)

        return Stage(features // tile * matrix.splits, run)

    def choose(self, row):
        refs = self.refs

        @pl.when(
            self.control.wait(
                self.at.logits, self.sizes.E // feature_tile(self.tiles, self.sizes.E)
            )
        )
        def _():
            real = refs.live[row] != 0
            results = (refs.experts, refs.weights)
            options = {"real": real, "warps": self.tiles.experts.warps, **self.options}
            top_k_row(refs.logits, refs.bias, *results, row, **options)
            self.control.publish(self.at.chosen)

    def up(self, item):
        refs, control, at = self.refs, self.control, self.at
        inner = self.tiles.experts.inner
        pair, tile = item // self.pair_tiles, item % self.pair_tiles

        def work():
            up_tile(
                refs.experts,
                refs.z,
                refs.w13,
                refs.w13_scale,
                refs.hidden,
                pair=pair,
                tile=tile,
                activation=self.activation,
                decoder=self.decoder,
                tiles=self.tiles.experts,
            )
            control.publish(at.hidden + pair)

        @pl.when(control.wait(at.chosen, self.sizes.W))
        def _():
            @pl.when(control.behind(at.latent, self.latent_tiles))
            def _():
                self.fetch(refs.w13_lines, pair, tile * inner, inner)
                self.fetch(refs.w13_lines, pair, tile * inner + self.sizes.I, inner)

            pl.when(control.wait(at.latent, self.latent_tiles))(work)

    def shared_down(self, item):
        refs, sizes, tiles = self.refs, self.sizes, self.tiles
        tile, depth = feature_tile(tiles, sizes.D), column_tile(tiles, sizes.S)
        feature = item * tile + jnp.arange(tile, dtype=jnp.int32)

        @pl.when(self.control.wait(self.at.shared, 2 * sizes.S // feature_tile(tiles, 2 * sizes.S)))
        def _():
            out = products(
                refs.inner, refs.shared_down, self.row_at, feature, 0, sizes.S // depth, depth
            )
            store_columns(refs.shared, out, self.row, feature)
            self.mark(out)

    def down(self, item):
        refs, control, at, tiles = self.refs, self.control, self.at, self.tiles.experts
        column_tiles = self.sizes.Z // tiles.columns
        pair, tile = item // column_tiles, item % column_tiles

        @pl.when(control.behind(at.hidden + pair, self.pair_tiles))
        def _():
            control.wait(at.chosen, self.sizes.W)
            self.fetch(refs.w2_lines, pair, tile * tiles.columns, tiles.columns)

        @pl.when(control.wait(at.hidden + pair, self.pair_tiles))
        def _():
            down_tile(
                refs.experts,
                refs.weights,
                refs.hidden,
                refs.w2,
                refs.w2_scale,
                refs.parts,
                pair=pair,
                tile=tile,
                decoder=self.decoder,
                tiles=tiles,
            )

            @pl.when(control.publish_last(at.columns + tile, self.pairs))
            def _():
                def combine(index, carry):
                    self.combine(tile * tiles.columns + index * tiles.column_step)
                    return carry

                lax.fori_loop(0, tiles.columns // tiles.column_step, combine, 0)

    def combine(self, first):
        """Sum the parts of every row's choices in the columns of one step from `first`."""
        refs, sizes = self.refs, self.sizes
        column = first + jnp.arange(self.tiles.experts.column_step, dtype=jnp.int32)
        start = jnp.zeros((column.size, self.row.size), jnp.float32)

        def part(choice):
            expert = launch.load(refs.experts.at[launch.mesh(self.row_at, choice)])
            taken = (self.row < sizes.W) & (expert >= 0) & (expert < sizes.E)
            at = (
                jnp.broadcast_to((self.row * sizes.J + choice)[None, :], start.shape),
                jnp.broadcast_to(column[:, None], start.shape),
            )
            mask = jnp.broadcast_to(taken[None, :], start.shape)
            values = launch.load(refs.parts.at[at], mask=mask, other=0.0)
            return lambda: values

        total = sum_blocks(part, sizes.J, SUMMED, start)
        store_columns(refs.routed, total, self.row, column)
        self.mark(total)


def store_columns(out_ref, out: jax.Array, row: jax.Array, column: jax.Array) -> None:
    """Store out [columns, R] to out_ref [W, N] where rows are below W."""
    place = (
        jnp.broadcast_to(row[None, :], out.shape),
        jnp.broadcast_to(column[:, None], out.shape),
    )
    mask = jnp.broadcast_to((row < out_ref.shape[0])[None, :], out.shape)
    launch.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)
