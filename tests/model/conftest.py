"""Models of the golden checkpoints, compiled once a session."""

import numpy as np
import pytest
from driving import K3_RUN, LINEAR_RUN, make_driver

from k3jax import lm


@pytest.fixture(scope="session")
def k3(golden):
    """k3-tiny-a in float32: 4 requests, decode steps of 1, 2 and 4 rows."""
    return make_driver(golden / "k3-tiny-a", **K3_RUN)


@pytest.fixture(scope="session")
def linear(golden):
    """kimi-linear-tiny in float32: 2 requests, plain decode."""
    return make_driver(golden / "kimi-linear-tiny", **LINEAR_RUN)


@pytest.fixture(scope="session")
def numbers(golden):
    """The recorded arrays of both models."""
    return {
        name: dict(np.load(golden / name / "golden.npz"))
        for name in ("k3-tiny-a", "kimi-linear-tiny")
    }


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


@pytest.fixture(scope="session")
def models(golden):
    """Both models in float32 as notebooks load them, to run the steps that the drivers run."""
    options = {"k3-tiny-a": K3_RUN, "kimi-linear-tiny": LINEAR_RUN}
    return {name: lm.load(golden / name, dtype="float32", **run) for name, run in options.items()}
