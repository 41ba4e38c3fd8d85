"""Gathering of everything that is wrong with a checkpoint into one readable error."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

FOLD_ABOVE = 8
"""More experts or layers than this with the same problem are written as ranges."""


class Problems:
    """What is wrong with the checkpoint at `where`; `raise_any` raises it all at once."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Note that the file or tensor `name` has a problem of this kind."""
        self._names[kind, detail].append(name)

    def __bool__(self) -> bool:
        return bool(self._names)

    def lines(self) -> list[str]:
        """One line a problem; many experts or layers with the same one share a line."""
        lines = []
        for (kind, detail), names in self._names.items():
            for name, count in fold(names):
                many = f" ({count} tensors)" if count > 1 else ""
                lines.append(f"{kind}: {name}{many}{': ' if detail else ''}{detail}")
        return lines

    def raise_any(self) -> None:
        """Raise one ValueError that lists every problem, if there is any."""
        if self._names:
            lines = "".join(f"\n- {line}" for line in self.lines())
            raise ValueError(f"{self.where} cannot be loaded:{lines}")


def fold(names: list[str]) -> list[tuple[str, int]]:
    """Write `experts.N` and `layers.N` of otherwise equal names as ranges.

    Returns (name, how many names it stands for) in the order of first appearance.
    """
    folded = [(name, 1) for name in names]
    for word in ("experts", "layers"):
        folded = _fold_word(folded, re.compile(rf"\b{word}\.(\d+)(?=\.)"), word)
    return folded


def _fold_word(
    names: list[tuple[str, int]], pattern: re.Pattern[str], word: str
) -> list[tuple[str, int]]:
    alike: defaultdict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for name, count in names:
        found = pattern.search(name)
        number = int(found[1]) if found else -1
        alike[pattern.sub(f"{word}.*", name, count=1), count].append((name, number))
    result = []
    for (template, count), members in alike.items():
        if len(members) <= FOLD_ABOVE or members[0][1] < 0:
            result += [(name, count) for name, _ in members]
        else:
            ranges = _ranges(sorted({number for _, number in members}))
            name = template.replace(f"{word}.*", f"{word}.[{ranges}]", 1)
            result.append((name, count * len(members)))
    return result


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as "1-3,7"; `numbers` ascending."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in parts)
