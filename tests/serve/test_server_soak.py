"""Two minutes of mixed traffic with a real engine: nothing stays. Longer: benchmarks.soak."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_engine import CHECKPOINT
from real_engine import free_port

from benchmarks import soak

FLAGS = "--minutes 2 --pauses 4 --clients 10 --growth 8"
SERVER = "--max-requests 8 --builds 1x8 --max-context 1024 --log none --compile-cache"


def test_two_minutes_of_everything():
    command = [sys.executable, "-m", "benchmarks.soak", *FLAGS.split()]
    command += ["--port", str(free_port())]
    command += ["--model", str(CHECKPOINT), "--", *SERVER.split()]
    command.append(os.environ["JAX_COMPILATION_CACHE_DIR"])
    done = subprocess.run(command, cwd=CHECKPOINT.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    kinds = {kind.__name__ for kind in soak.Client("http://x:1", 0).kinds}
    assert set(result["requests"]) == kinds
    assert result["wrong"] == []
    print(done.stdout)


def sample(**held):
    names = (*soak.IDLE, *soak.HELD, *soak.MEMORY, "compilations_total")
    return {**dict.fromkeys(names, 0.0), **held}


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({}, []),
        ({"slots_in_use": 1.0}, ["slots_in_use is 1 while idle"]),
        ({"pages_in_use": 3.0}, ["pages_in_use is 3 while idle"]),
        ({"tasks": 9.0}, ["tasks grew from 0 to 9"]),
        ({"open_files_front": 1.0}, ["open_files_front grew from 0 to 1"]),
        ({"memory_bytes_engine": 2.0**20}, []),
        ({"memory_bytes_engine": 3 * 2.0**20}, ["memory_bytes_engine grew by 3.0 MiB"]),
        ({"compilations_total": 1.0}, ["steps were compiled while serving"]),
    ],
)  # fmt: skip
def test_what_is_not_given_back_is_named(last, said):
    assert soak.complaints([sample(), sample(), sample(**last)], growth=2.0) == said


IDLE, BUSY = sample(), sample(slots_in_use=1.0)
GROWN = sample(memory_bytes_engine=3 * 2.0**20)


@pytest.mark.parametrize(
    "looks", [[IDLE, IDLE], [BUSY, IDLE, BUSY, IDLE, IDLE], [GROWN, GROWN, IDLE, IDLE]]
)
def test_a_pause_ends_once_a_server_holds_nothing_more(monkeypatch, looks):
    monkeypatch.setattr(soak, "LOOK_SECONDS", 0.0)
    left = iter(looks)
    monkeypatch.setattr(soak, "sample", lambda url: next(left))
    assert asyncio.run(soak.settle("http://x:1", [sample()] * 2, 2.0)) == IDLE
    assert next(left, None) is None


def test_a_pause_ends_all_the_same(monkeypatch):
    monkeypatch.setattr(soak, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(soak, "sample", lambda url: GROWN)
    assert asyncio.run(soak.settle("http://x:1", [sample()] * 2, 2.0)) == GROWN


def test_a_wrong_answer_is_named_and_the_others_go_on(monkeypatch, capsys):
    async def fails(counts, until):
        raise RuntimeError("200 was expected, but came 500")

    async def answers(counts, until):
        counts["chat"] += 1

    async def settle(url, samples, growth):
        return sample()

    runs = (fails, answers)
    monkeypatch.setattr(soak, "Client", lambda url, seed: SimpleNamespace(run=runs[seed]))
    monkeypatch.setattr(soak, "settle", settle)
    options = SimpleNamespace(minutes=0.0, pauses=2, clients=2, growth=8.0)
    wrong = []
    samples, counts = asyncio.run(soak.soak("http://x:1", options, wrong))
    assert (len(samples), counts["chat"]) == (2, 2)
    assert wrong == ["RuntimeError: 200 was expected, but came 500"] * 2
    assert capsys.readouterr().out.count("does not hold") == 2


def test_without_metrics_it_ends(monkeypatch):
    async def settle(url, samples, growth):
        raise ConnectionRefusedError("no server")

    monkeypatch.setattr(soak, "settle", settle)
    options = SimpleNamespace(minutes=0.0, pauses=9, clients=0, growth=8.0)
    wrong = []
    samples, _ = asyncio.run(soak.soak("http://x:1", options, wrong))
    assert samples == []
    assert wrong == ["/metrics: ConnectionRefusedError('no server')"]
