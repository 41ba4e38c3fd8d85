"""Mixed traffic for many steps: nothing is compiled or grows, no page, slot or snapshot is lost."""

import pytest
from traffic import engine_on, scarce, soak


@pytest.fixture(scope="module")
def engine(golden):
    """Kernels where they compile."""
    executor = scarce(golden)
    return engine_on(executor, executor)


@pytest.mark.parametrize("steps", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_soak(engine, steps):
    wrong, stats = soak(engine, steps)
    assert wrong == []
    print(f"\n{steps} steps: {stats.finished}, {stats.preemptions} preemptions, {stats.steps}")
