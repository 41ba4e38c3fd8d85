"""Documents as rows of a fixed length, epoch after epoch, from a seed and a position alone.

A row holds whole documents, or pieces of long ones, at least GAP padding tokens apart; a document
that is longer than a row is cut, elsewhere in every epoch, and each piece starts from zero state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from checkpoints.recipe.arrays import Split

T = TypeVar("T")

GAP = 3  # the short convolution reads so many tokens back
OPEN_ROWS = 32  # rows that a piece may still go into


class Piece(NamedTuple):
    """Tokens [start, stop) of a document that ends before `end`."""

    start: int
    stop: int
    end: int

    @property
    def targets(self) -> slice:
        """What follows each of its tokens, as far as the document goes."""
        return slice(self.start + 1, min(self.stop + 1, self.end))


class Batch(NamedTuple):
    """B rows of T tokens on the host."""

    tokens: np.ndarray  # i32[B, T]
    targets: np.ndarray  # i32[B, T] the token after each
    weights: np.ndarray  # f32[B, T] 0 where there is no target, or none that counts
    first: np.ndarray  # bool[B, T] a piece starts
    valid: np.ndarray  # bool[B, T] no padding


def cut(split: Split, length: int, rng: np.random.Generator | None) -> list[Piece]:
    """The documents as pieces of at most `length` tokens; without a generator cut at multiples."""
    pieces = []
    for start, end in zip(split.starts.tolist(), split.ends.tolist(), strict=True):
        stop = start + length
        if rng is not None and end > stop:
            stop = start + int(rng.integers(length // 2, length + 1))
        while start < end:
            stop = min(stop, end)
            pieces.append(Piece(start, stop, end))
            start, stop = stop, stop + length
    return pieces


def pack_rows(pieces: list[Piece], length: int) -> list[list[Piece]]:
    """Pieces into rows of `length`: each into the first of the open rows that has room."""
    rows: list[list[Piece]] = []
    opened: list[tuple[int, list[Piece]]] = []  # (tokens left, row)
    for piece in pieces:
        size = piece.stop - piece.start
        place = next((i for i, (left, _) in enumerate(opened) if size <= left), None)
        if place is None:
            if len(opened) == OPEN_ROWS:
                opened.pop(0)
            rows.append([])
            opened.append((length, rows[-1]))
            place = len(opened) - 1
        left, row = opened[place]
        row.append(piece)
        opened[place] = (left - size - GAP, row)
    return rows


def fill(split: Split, rows: list[list[Piece]], length: int) -> Batch:
    """The arrays of some rows."""
    shape = (len(rows), length)
    batch = Batch(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape, bool),
        np.zeros(shape, bool),
    )
    for index, row in enumerate(rows):
        at = 0
        for piece in row:
            after = at + piece.stop - piece.start
            targets = split.tokens[piece.targets]
            batch.tokens[index, at:after] = split.tokens[piece.start : piece.stop]
            batch.targets[index, at : at + len(targets)] = targets
            batch.weights[index, at : at + len(targets)] = split.weights[piece.targets]
            batch.first[index, at] = True
            batch.valid[index, at:after] = True
            at = after + GAP
    return batch


@dataclass
class Cursor:
    """Where a stream stands; all that is needed to go on."""

    epoch: int = 0
    row: int = 0


class Stream:
    """A split's rows without end, shuffled and cut anew in every epoch."""

    def __init__(self, split: Split, length: int, seed: int, cursor: Cursor | None = None):
        self.split, self.length, self.seed = split, length, seed
        self.cursor = cursor or Cursor()
        self.rows = self._epoch(self.cursor.epoch)

    def _epoch(self, number: int) -> list[list[Piece]]:
        rng = np.random.default_rng((self.seed, number))
        pieces = cut(self.split, self.length, rng)
        rng.shuffle(pieces)
        rows = pack_rows(pieces, self.length)
        rng.shuffle(rows)
        return rows

    def take(self, count: int) -> list[list[Piece]]:
        """The next `count` rows."""
        taken: list[list[Piece]] = []
        while len(taken) < count:
            if self.cursor.row == len(self.rows):
                self.cursor = Cursor(self.cursor.epoch + 1)
                self.rows = self._epoch(self.cursor.epoch)
            part = self.rows[self.cursor.row : self.cursor.row + count - len(taken)]
            taken += part
            self.cursor.row += len(part)
        return taken


def held_rows(split: Split, length: int, count: int) -> Batch:
    """Up to `count` rows of a split, the same ones every time, from all over it."""
    rows = pack_rows(cut(split, length, None), length)
    return fill(split, evenly(rows, count), length)


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Up to `count` of some things, from all over them."""
    places = np.unique(np.linspace(0, len(items) - 1, count).astype(int))
    return [items[place] for place in places]


def join(batches: list[Batch]) -> Batch:
    """Batches one under the other."""
    return Batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
