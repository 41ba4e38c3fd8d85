"""Stop strings in a stream of text: found wherever it is cut, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first; of two that end together, the longer.

    `matched` is it, once found. What might be the beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now: up to the stop string once there is one."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        kept = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
