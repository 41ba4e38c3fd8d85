"""Documents as arrays of tokens, in a file that needs only NumPy to be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

Encoded = tuple[list[int], list[bool], int]
"""Tokens, for each whether predicting it is learned, and the bytes of the text to predict."""


@dataclass(frozen=True)
class Split:
    """Documents one after the other.

    tokens uint16 [T]; weights uint8 [T], 1 where the loss of predicting that token counts;
    starts int64 [D], where each document begins; bytes int64 [D], of the text to predict.
    """

    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[Encoded]) -> Self:
        """Arrays of documents."""
        tokens: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        sizes = []
        for ids, learned, size in documents:
            tokens.append(np.array(ids, np.uint16))
            weights.append(np.array(learned, np.uint8))
            sizes.append(size)
        ends = np.cumsum([len(ids) for ids in tokens])
        starts = np.concatenate([[0], ends[:-1]])
        return cls(np.concatenate(tokens), np.concatenate(weights), starts, np.array(sizes))

    @property
    def ends(self) -> np.ndarray:
        """Where each document ends, int64 [D]."""
        return np.append(self.starts[1:], len(self.tokens))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(*(arrays[name] for name in ("tokens", "weights", "starts", "bytes")))

    def save(self, path: Path) -> None:
        """Write a compressed NumPy archive."""
        np.savez_compressed(
            path,
            tokens=self.tokens,
            weights=self.weights,
            starts=self.starts,
            bytes=self.bytes,
        )
