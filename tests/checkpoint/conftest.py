"""Editable copies of the golden checkpoints."""

import pytest
from editable import editable_copy


@pytest.fixture(params=["k3-tiny-a", "kimi-linear-tiny"])
def either(request, golden, tmp_path):
    """A copy of each golden checkpoint in turn."""
    return editable_copy(golden / request.param, tmp_path)


@pytest.fixture
def k3(golden, tmp_path):
    """A copy of k3-tiny-a."""
    return editable_copy(golden / "k3-tiny-a", tmp_path)


@pytest.fixture
def linear(golden, tmp_path):
    """A copy of kimi-linear-tiny."""
    return editable_copy(golden / "kimi-linear-tiny", tmp_path)
