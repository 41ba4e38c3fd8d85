"""Ends a process whose step does not land: a peer died, or a device hangs. No jax import."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_TIMEOUT_STATUS = 3
"""Exit status of a process whose step did not land; its socket belongs to the thread that hangs."""


def end_process(message: str, status: int = 1) -> None:
    """Say why on stderr and end at once: threads that hang in a collective cannot be joined."""
    print(f"fatal: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def end_after_timeout(message: str) -> None:
    """End the process for a step that did not land."""
    end_process(message, STEP_TIMEOUT_STATUS)


class Watchdog:
    """Watches the one blocking read of a step from a thread of its own."""

    def __init__(self, seconds: float, expire: Callable[[str], None] = end_after_timeout) -> None:
        """`expire` is told, from that thread, of a step that took more than `seconds`."""
        self.seconds, self.expire = seconds, expire
        self._waiting: tuple[int, float] | None = None  # step, deadline
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="step timeout", daemon=True).start()

    @contextmanager
    def landing(self, step: int) -> Iterator[None]:
        """Around the read of a step's results."""
        self._waiting = (step, time.monotonic() + self.seconds)
        try:
            yield
        finally:
            self._waiting = None

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            waiting = self._waiting
            if waiting is not None and time.monotonic() > waiting[1]:
                self.expire(
                    f"step {waiting[0]} did not land within {self.seconds:g} s (--step-timeout): "
                    "another rank ended or a device hangs. Restart the engine"
                )
                return
