"""Chance with a seed, and the line between what is trained on and what is held out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ONE_IN = 10  # of all contents are held out
NEW_PHRASES = 0.3  # of the phrases of held-out conversations are never trained on


def is_held(content: str) -> bool:
    """Whether a content (a pair of numbers, a word, a date) is kept from training."""
    return zlib.crc32(content.encode()) % ONE_IN == 0


class Draw:
    """Draws the contents of one conversation, of the training side or of the held-out side."""

    def __init__(self, seed: str, *, held: bool) -> None:
        self._random = random.Random(seed)  # the same for a text on every platform
        self.held = held

    def chance(self, share: float) -> bool:
        """Whether something happens that happens in this share of all cases."""
        return self._random.random() < share

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self._random.randint(low, high)

    def any(self, choices: Sequence[T]) -> T:
        """One of several, on either side."""
        return self._random.choice(choices)

    def some(self, choices: Sequence[T], count: int | None = None) -> list[T]:
        """Several different ones in any order, on either side; all of them without a count."""
        return self._random.sample(choices, len(choices) if count is None else count)

    def weighted(self, choices: dict[T, int]) -> T:
        """One of several, by their weights, on either side."""
        (choice,) = self._random.choices(list(choices), list(choices.values()))
        return choice

    def content(self, make: Callable[[], T]) -> T:
        """The first of the things that `make` makes which belongs to this side."""
        while True:
            made = make()
            if is_held(str(made)) == self.held:
                return made

    def item(self, pool: Sequence[str]) -> str:
        """One of a long list, of this side's share of it."""
        return self.content(lambda: self.any(pool))

    def items(self, pool: Sequence[str], count: int) -> list[str]:
        """Several different ones of this side's share of a long list."""
        return self.some(sorted({item for item in pool if is_held(item) == self.held}), count)

    def phrase(self, phrases: Sequence[str]) -> str:
        """One of several ways to say a thing; the last of them is for held-out conversations."""
        if self.held and self.chance(NEW_PHRASES):
            return phrases[-1]
        return self.any(phrases[:-1])

    def number(self, most_digits: int = 6) -> int:
        """A number from 0 on, each count of digits as likely as another."""
        digits = self.whole(1, most_digits)
        return self.whole(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)

    def made_up(self) -> str:
        """A word that does not exist, of this side."""
        return self.content(
            lambda: (
                "".join(
                    self.any("bcdfghjklmnprstvwz") + self.any("aeiou")
                    for _ in range(self.whole(1, 3))
                )
                + self.any(["", "n", "r", "l", "s", "t", "m", "x", "nd", "rk"])
            )
        )
