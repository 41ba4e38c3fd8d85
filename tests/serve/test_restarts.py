"""What follows an engine that failed."""

import signal

import msgspec
import pytest

from k3jax.decode.watchdog import STEP_TIMEOUT_STATUS
from k3jax.serve.link import WorkerSettings
from k3jax.serve.restarts import Death, Restarts, death_of

WORKER = WorkerSettings(address="", parent=1, model="m", inject_fault="0:1:wait")
KERNELS, OTHER = Death("a fail-stop", kernels=True), Death("killed")


@pytest.mark.parametrize(
    ("status", "kernels", "text"),
    [
        (-signal.SIGKILL, False, "SIGKILL"),
        (-signal.SIGTERM, False, "SIGTERM"),
        (-signal.SIGABRT, True, "SIGABRT"),
        (-signal.SIGSEGV, True, "SIGSEGV"),
        (STEP_TIMEOUT_STATUS, True, "--step-timeout"),
        (1, False, "with status 1"),
        (0, False, "with status 0"),
    ],
)
def test_what_a_status_says(status, kernels, text):
    death = death_of(status)
    assert death.kernels == kernels
    assert text in death.reason


@pytest.mark.parametrize(
    ("backend", "death", "then"),
    [
        (None, KERNELS, "stock"),
        ("auto", KERNELS, "stock"),
        ("stock", KERNELS, "stock"),
        (None, OTHER, None),
        ("auto", OTHER, "auto"),
        ("specialized", OTHER, "specialized"),
    ],
)
def test_the_path_of_the_next_engine(backend, death, then):
    worker = msgspec.structs.replace(WORKER, decode_backend=backend)
    following = Restarts().next(worker, death, 0.0)
    assert following.decode_backend == then
    assert following.inject_fault is None
    assert following.model == "m"
    # It stays there.
    assert Restarts().next(following, OTHER, 1.0).decode_backend == then


def test_kernels_alone_are_not_left():
    worker = msgspec.structs.replace(WORKER, decode_backend="specialized")
    with pytest.raises(RuntimeError, match="specialized allows no other path"):
        Restarts().next(worker, KERNELS, 0.0)


def test_so_many_in_a_while():
    restarts = Restarts(count=2, seconds=100.0)
    restarts.next(WORKER, OTHER, 0.0)
    restarts.next(WORKER, OTHER, 60.0)
    with pytest.raises(RuntimeError, match="2 engines failed within 99 s"):
        restarts.next(WORKER, OTHER, 99.0)
    restarts.next(WORKER, OTHER, 100.0)
    with pytest.raises(RuntimeError, match="within 59 s"):
        restarts.next(WORKER, OTHER, 119.0)
