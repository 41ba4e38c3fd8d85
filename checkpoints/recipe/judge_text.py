"""What a checkpoint makes of held-out text: its loss, bits a byte, and its experts' loads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.recipe.arrays import Split
from checkpoints.recipe.batches import Piece, cut, evenly
from k3jax.explore import experts
from k3jax.lm import LanguageModel

TRACED = 512  # tokens of a piece whose experts are counted
CHAT_DOCUMENTS = 400  # of the held-out conversations: enough for a loss, quick on a CPU


@dataclass(frozen=True)
class Loss:
    """-ln p summed over the tokens that count, and how many those are."""

    nll: float
    count: float

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nll + other.nll, self.count + other.count)

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.nll / max(self.count, 1.0)


def head(split: Split, documents: int) -> Split:
    """The first documents of a split."""
    if documents >= len(split.starts):
        return split
    end = int(split.starts[documents])
    return Split(
        split.tokens[:end],
        split.weights[:end],
        split.starts[:documents],
        split.bytes[:documents],
    )


def piece_loss(model: LanguageModel, split: Split, piece: Piece, skipped: int = 0) -> Loss:
    """The loss of predicting what follows each token of a piece, the first `skipped` left out."""
    targets = jnp.asarray(split.tokens[piece.targets].astype(np.int32))
    logits = jnp.asarray(model.logits(split.tokens[piece.start : piece.stop].tolist()))
    logits = logits[: targets.size]
    own = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    nll = np.asarray(jax.nn.logsumexp(logits, axis=-1) - own, np.float64)
    weights = split.weights[piece.targets].astype(np.float64)
    return Loss(float((nll * weights)[skipped:].sum()), float(weights[skipped:].sum()))


def held_loss(model: LanguageModel, split: Split, length: int) -> Loss:
    """The loss over a split in the pieces that training is judged by: from zero state each."""
    pieces = cut(split, length, None)
    return sum((piece_loss(model, split, piece) for piece in pieces), Loss(0.0, 0.0))


def bits_per_byte(model: LanguageModel, split: Split, length: int) -> float:
    """Bits for each byte of text; every token is predicted from half a window before it or more.

    Windows of `length` tokens, each half a window further; a document's start has what there is.
    """
    total = Loss(0.0, 0.0)
    for piece, skipped in windows(split, length):
        total += piece_loss(model, split, piece, skipped)
    return total.nll / math.log(2) / float(split.bytes.sum())


def windows(split: Split, length: int) -> Iterator[tuple[Piece, int]]:
    """Overlapping pieces of each document, and how many predictions an earlier one has made."""
    for begin, end in zip(split.starts.tolist(), split.ends.tolist(), strict=True):
        start, predicted = begin, 0
        while True:
            stop = min(start + length, end)
            yield Piece(start, stop, end), predicted
            if stop == end:
                break
            start, predicted = start + length // 2, length - length // 2


def expert_loads(model: LanguageModel, split: Split, pieces: int) -> np.ndarray:
    """How often each expert is chosen in pieces from all over a split: i64[MoE layers, E]."""
    counts = []
    for piece in evenly(cut(split, TRACED, None), pieces):
        trace = model.trace(split.tokens[piece.start : piece.stop].tolist())
        counts.append(experts.counts(trace, model.config)[1])
    return np.sum(counts, axis=0)
