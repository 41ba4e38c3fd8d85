"""The arithmetic of benchmarks/timing.py, on a made trace."""

import jax.numpy as jnp
import pytest

from benchmarks import timing

PAUSE = timing.PAUSE


def run(start, applications):
    """A run whose application is a kernel of 3 us, a gap of 1 us, one of 2 us, a gap of 1 us."""
    events = []
    for index in range(applications):
        at = start + index * 7e-6
        events += [("first", at, at + 3e-6), ("second", at + 4e-6, at + 6e-6)]
    return events


def test_runs_are_parted_by_silence():
    runs = [run(index * (PAUSE + 1e-4), 4) for index in range(5)]
    assert timing.split_runs([event for each in runs for event in each]) == runs
    assert timing.split_runs([]) == []


def test_times_of_an_application():
    runs = [run(0.0, 4), run(1.0, 4), run(2.0, 4)]
    runs[1][-1] = ("second", runs[1][-1][1], runs[1][-1][2] + 4e-6)
    found = timing._timing(4, runs)
    assert found.seconds == pytest.approx(27e-6 / 4)
    assert found.spread == pytest.approx(1e-6)
    assert found.parts == pytest.approx({"first": 3e-6, "second": 2e-6})
    assert found.kernels == pytest.approx(5e-6)
    assert found.launches == 2


def test_state_is_handed_on_and_the_callers_arrays_stay():
    sets = [(jnp.zeros(2), jnp.full(2, index)) for index in (1.0, 2.0)]
    program = timing.compile_over(lambda state, x: (state + x, x), sets, carry=True)
    program.run()
    program.run()
    assert [float(state[0]) for state in program.states] == [2.0, 4.0]
    assert not sets[0][0].any()


def test_a_trace_that_shows_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(timing, "_device_events", lambda directory: [])
    program = timing.compile_over(lambda x: x + 1, [(jnp.zeros(2),)])
    with pytest.raises(RuntimeError, match="shows 0 runs of 5"):
        timing.device_times([program])
