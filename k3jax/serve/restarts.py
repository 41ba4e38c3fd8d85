"""What follows an engine that failed: another one, and on which path, or none."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass

import msgspec

from k3jax.decode.watchdog import STEP_TIMEOUT_STATUS
from k3jax.serve.link import WorkerSettings

RESTARTS = 5  # within RESTART_SECONDS; a fault that comes again at once should reach somebody
RESTART_SECONDS = 3600.0
# What native code ends of by itself: a GPU's memory fault is an abort. Others were sent.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Death:
    """What an engine died of; `kernels`: it may be the fault of the code on the devices."""

    reason: str
    kernels: bool = False


def death_of(status: int) -> Death:
    """What the exit status of an engine process says."""
    if status < 0:
        number = signal.Signals(-status)
        return Death(f"the engine process ended by signal {number.name}", number in CRASHES)
    if status == STEP_TIMEOUT_STATUS:
        return Death("a step did not land within --step-timeout; the log says which", True)
    return Death(f"the engine process ended with status {status}")


class Restarts:
    """Decides after each death of an engine of one server."""

    def __init__(self, count: int = RESTARTS, seconds: float = RESTART_SECONDS) -> None:
        """At most `count` engines within any `seconds` are followed by another."""
        self._seconds = seconds
        self._deaths: deque[float] = deque(maxlen=count)

    def next(self, worker: WorkerSettings, death: Death, now: float) -> WorkerSettings:
        """The settings of the next engine; RuntimeError says why there is none.

        Where the kernels may be to blame it runs without them, and stays there: nobody knows that
        they are well again. An operator who asked for them alone (`specialized`) is not given
        another path unasked: a supervisor may start the server again as it was told to. A fault
        that is injected comes once.
        """
        if death.kernels and worker.decode_backend == "specialized":
            raise RuntimeError(
                "--decode-backend specialized allows no other path than the one that failed "
                "(auto goes on on the stock path)"
            )
        times = self._deaths
        if len(times) == times.maxlen and now - times[0] < self._seconds:
            raise RuntimeError(
                f"{len(times)} engines failed within {now - times[0]:.0f} s and were followed by "
                f"another, which is as many as may be in {self._seconds:.0f} s"
            )
        times.append(now)
        backend = "stock" if death.kernels else worker.decode_backend
        return msgspec.structs.replace(worker, decode_backend=backend, inject_fault=None)
