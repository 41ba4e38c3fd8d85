"""The arithmetic of benchmarks/timing.py, on a made trace."""

import jax.numpy as jnp
import pytest

from benchmarks import timing

PAUSE = timing.PAUSE


def run(start, applications, device="0"):
    """A run whose application is a kernel of 3 us, a gap of 1 us, one of 2 us, a gap of 1 us."""
    events = []
    for index in range(applications):
        at = start + index * 7e-6
        for name, begin, end in [("first", 0.0, 3e-6), ("second", 4e-6, 6e-6)]:
            events.append(timing.Event(name, at + begin, at + end, device))
    return events


def lengthened(events, seconds):
    """With an end that comes so much later."""
    last = events[-1]
    return [*events[:-1], last._replace(end=last.end + seconds)]


def test_runs_are_parted_by_silence():
    runs = [run(index * (PAUSE + 1e-4), 4) for index in range(5)]
    assert timing.split_runs([event for each in runs for event in each]) == runs
    assert timing.split_runs([]) == []


def test_times_of_an_application():
    runs = [run(0.0, 4), lengthened(run(1.0, 4), 4e-6), run(2.0, 4)]
    found = timing._timing(4, runs)
    assert found.seconds == pytest.approx(27e-6 / 4)
    assert found.spread == pytest.approx(1e-6)
    assert found.parts == pytest.approx({"first": 3e-6, "second": 2e-6})
    assert found.kernels == pytest.approx(5e-6)
    assert found.launches == 2
    assert found.by_device == (found.seconds,)


def test_the_slowest_of_several_devices_counts():
    """Their kernels run at once, and the later one starts before the earlier one's pause ends."""
    starts = [index * (PAUSE + 1e-4) for index in range(3)]
    runs = [
        sorted(
            [*run(start, 4), *lengthened(run(start + 2e-6, 4, "1"), 8e-6)], key=lambda e: e.start
        )
        for start in starts
    ]
    assert timing.split_runs([event for each in runs for event in each]) == runs
    found = timing._timing(4, runs)
    assert found.seconds == pytest.approx(35e-6 / 4)
    assert found.by_device == pytest.approx((27e-6 / 4, 35e-6 / 4))
    assert found.launches == 2
    assert found.parts == pytest.approx({"first": 3e-6, "second": 2e-6})
    with pytest.raises(RuntimeError, match="shows 1 in 2 of 3"):
        timing._timing(4, [*runs[:2], run(1.0, 4)])


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
