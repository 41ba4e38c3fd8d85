"""The golden models in float32, loaded and compiled once a session."""

import numpy as np
import pytest
from driving import K3_RUN, LINEAR_RUN, Driver

from k3jax import lm

NAMES = ("k3-tiny-a", "kimi-linear-tiny")


@pytest.fixture(scope="session")
def numbers(golden):
    """The recorded arrays of both models."""
    return {name: dict(np.load(golden / name / "golden.npz")) for name in NAMES}


@pytest.fixture(scope="session")
def models(golden):
    """Both models as notebooks load them."""
    runs = zip(NAMES, (K3_RUN, LINEAR_RUN), strict=True)
    return {name: lm.load(golden / name, dtype="float32", **run) for name, run in runs}


@pytest.fixture(scope="session")
def k3(models):
    """k3-tiny-a: 4 requests, decode steps of 1 and 4 rows."""
    return Driver(models["k3-tiny-a"].engine.executor)


@pytest.fixture(scope="session")
def linear(models):
    """kimi-linear-tiny: 2 requests, plain decode."""
    return Driver(models["kimi-linear-tiny"].engine.executor)


@pytest.fixture(scope="session")
def close():
    """Check against golden numbers: max abs 3e-4, Frobenius 1e-5."""

    def check(found, wanted, name=""):
        assert found.shape == wanted.shape, name
        difference = np.asarray(found, np.float64) - wanted
        assert np.abs(difference).max() <= 3e-4, (name, np.abs(difference).max())
        relative = np.linalg.norm(difference) / np.linalg.norm(wanted)
        assert relative <= 1e-5, (name, relative)

    return check
