"""A step that does not land is told of once, a step that lands never."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from k3jax.decode import watchdog
from k3jax.decode.watchdog import STEP_TIMEOUT_STATUS, Watchdog


def test_a_step_that_lands_is_not_told_of(monkeypatch):
    """By a clock of its own: on a busy machine any step may take a while."""
    told, now = [], [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watching = Watchdog(0.4, told.append)
    for step in range(2):
        with watching.landing(step):
            now[0] += 0.3
            time.sleep(0.2)  # it looks twice meanwhile
        now[0] += 10.0
        time.sleep(0.2)
    watching.close()
    assert not told


def test_a_step_that_does_not_land():
    told, event = [], threading.Event()
    watchdog = Watchdog(0.1, lambda text: (told.append(text), event.set()))
    with watchdog.landing(7):
        assert event.wait(30)
    (text,) = told
    assert text.startswith("step 7 did not land within 0.1 s (--step-timeout)")


def test_the_process_ends():
    code = (
        "import time; from k3jax.decode.watchdog import Watchdog\n"
        "with Watchdog(0.1).landing(3): time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50)
    assert done.returncode == STEP_TIMEOUT_STATUS
    assert b"fatal: step 3 did not land" in done.stderr
