"""What the benchmarks' loops share: one case's failure is not the others', and time is limited."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator


def add_limit(parser: argparse.ArgumentParser) -> None:
    """The flag that `Progress` takes."""
    parser.add_argument("--minutes", type=float, help="begin no case after so many; default: all")


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Progress:
    """Which cases failed and which were left out for want of time; says so at once."""

    def __init__(self, minutes: float | None = None) -> None:
        self.failed: list[str] = []
        self.left: list[str] = []
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def status(self) -> int:
        """Exit status: 0 if every case was measured."""
        return int(bool(self.failed or self.left))

    @property
    def seconds_left(self) -> float | None:
        """Until the limit; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def fail(self, name: str, why: str) -> None:
        print(f"{name:40} FAILED: {why}", flush=True)
        self.failed.append(name)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Around what may fail for one case; the others go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the others
            self.fail(name, reason(error))

    def in_time(self, *names: str) -> bool:
        """Whether cases may still begin; if not, they are noted as left out."""
        if self.seconds_left != 0.0:
            return True
        print(f"out of time, not measured: {', '.join(names)}", flush=True)
        self.left += names
        return False

    def record(self) -> dict[str, list[str]]:
        """For the line of JSON."""
        return {"failed": self.failed, "left": self.left}
