"""benchmarks.serve: one level that fails, or a server that does not end, costs no result."""

import subprocess
import sys

import pytest
from commands import command, last_line

from benchmarks import serve

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def started(monkeypatch):
    """The processes that were started; one counts as ready once it has said something."""
    processes, popen = [], subprocess.Popen

    def start(command):
        processes.append(popen(command, stdout=subprocess.PIPE))
        return processes[-1]

    def ready(url):
        assert url == "http://127.0.0.1:1/ready"
        return bool(processes[-1].stdout.readline())

    monkeypatch.setattr(serve.subprocess, "Popen", start)
    monkeypatch.setattr(serve, "ready", ready)
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_does_not_end_is_killed(monkeypatch, capsys, started):
    monkeypatch.setattr(serve, "END_SECONDS", 0.2)
    with serve.running([sys.executable, "-c", STUBBORN], "http://127.0.0.1:1", "/ready", 30.0):
        assert started[0].poll() is None
    assert started[0].returncode == -9
    assert capsys.readouterr().out == "the server did not end within 0.2 s, and is killed\n"


def test_a_server_that_ends_too_soon_is_told(started):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match="not ready; exit status 3"),
        serve.running(command, "http://127.0.0.1:1", "/ready", 30.0),
    ):
        pytest.fail("it never was ready")


def test_a_server_that_refuses_has_no_times(monkeypatch, capsys):
    async def level(url, concurrency, options):
        if concurrency == 4:
            raise RuntimeError("429")
        return dict.fromkeys(("concurrency", "ttft", "tpot", "tokens", "requests"), 1.0)

    monkeypatch.setattr(serve, "level", level)
    assert command(monkeypatch, serve, "--url", "http://127.0.0.1:1") == 1
    rows, record = last_line(capsys)
    assert record["failed"] == ["4 clients"]
    assert len(record["results"]) == 2
    assert len(rows) == 4
