"""The front as a process, with a fake engine child: start, drain, death."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from fake_engine import CHECKPOINT, script
from waiting import eventually

from k3jax.bundled import bundled_model
from k3jax.serve.__main__ import front_settings, main

FRONT = [sys.executable, str(Path(__file__).parent / "front_with_fake_worker.py")]


class Process:
    """A running front; `url` once it has printed its address."""

    def __init__(self, *flags):
        self.process = subprocess.Popen(
            [*FRONT, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(CHECKPOINT.parent.parent)},
        )
        self.url = ""

    def wait_until_ready(self):
        out = self.process.stdout
        assert select.select([out], [], [], 30)[0], "no address was printed"
        line = out.readline()
        self.url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        self.curl = out.readline()

    def wait_for_port(self):
        """The address before the engine is ready: from the process' own sockets."""
        process = psutil.Process(self.process.pid)

        def listening():
            ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"]
            if ports:
                self.url = f"http://127.0.0.1:{ports[0]}"
            return ports

        eventually(listening, 30)
        eventually(process.children, 30)

    def engine(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def post(self, prompt, **fields):
        body = {"prompt": prompt, "max_tokens": 400, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def wait_for_first_tokens(self, count):
        """Until so many requests, from the start on, have had their first token."""

        def came():
            text = httpx.get(f"{self.url}/metrics").text
            return f"k3jax_ttft_seconds_count {float(count)}" in text

        eventually(came, 30)

    def end(self, seconds=15):
        """Exit status and what was written to stderr."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


@pytest.fixture
def start():
    fronts = []

    def make(*flags):
        fronts.append(Process(*flags))
        return fronts[-1]

    yield make
    for front in fronts:
        with front.process:  # closes the pipes
            front.process.kill()


def in_thread(function, *arguments, **fields):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments, **fields)))
    thread.start()

    def result():
        thread.join(30)
        return results[0]

    return result


def test_serve_and_drain(start):
    front = start()
    front.wait_until_ready()
    assert front.post(script("héllo■")).json()["choices"][0]["text"] == "héllo"
    engine = front.engine()
    whole = in_thread(front.post, script("a" * 100, delay=0.04))
    stream = in_thread(front.post, script("b" * 100, delay=0.04), stream=True)
    front.wait_for_first_tokens(3)
    front.process.terminate()
    assert whole().json()["choices"][0]["text"] == "a" * 100
    assert stream().text.count('"text":"b"') == 100
    status, errors = front.end()
    assert status == 0, errors
    assert "stopping: 2 open requests may end" in errors
    assert not engine.is_running()


def test_the_printed_curl_works_and_the_port_is_taken(start, capsys):
    front = start("--served-model-name", "mine")
    front.wait_until_ready()
    reply = subprocess.run(front.curl, shell=True, capture_output=True, text=True, timeout=30)
    assert json.loads(reply.stdout)["model"] == "mine"
    assert main(["--port", front.url.rpartition(":")[2]]) == 2
    assert "in use" in capsys.readouterr().err
    front.process.send_signal(signal.SIGINT)
    assert front.end()[0] == 0


def test_the_drain_is_bounded(start):
    front = start("--drain-seconds", "1")
    front.wait_until_ready()

    def read_until_cut():
        with pytest.raises(httpx.RemoteProtocolError):
            front.post(script("a" * 300, delay=0.1), stream=True)

    wait = in_thread(read_until_cut)
    front.wait_for_first_tokens(1)
    began = time.monotonic()
    front.process.terminate()
    status, errors = front.end()
    assert status == 0, errors
    assert time.monotonic() - began < 10
    wait()


def test_health_and_progress_while_the_engine_loads(start):
    front = start("--page-size", "300")  # the fake worker loads for three seconds
    front.wait_for_port()
    eventually(lambda: httpx.get(f"{front.url}/health").status_code == 200)
    eventually(lambda: "fake worker loads" in httpx.get(f"{front.url}/ready").text)
    assert httpx.get(f"{front.url}/ready").status_code == 503
    assert front.post("x").status_code == 503
    engine = front.engine()
    front.process.terminate()
    status, errors = front.end()
    assert status == 0
    assert f"fake worker loads {CHECKPOINT}" in errors
    assert not engine.is_running()


def test_the_death_of_the_engine(start):
    front = start()
    front.wait_until_ready()
    whole = in_thread(front.post, script("a" * 300, delay=0.02))
    stream = in_thread(front.post, script("b" * 300, delay=0.02), stream=True)
    front.wait_for_first_tokens(2)
    front.engine().kill()
    assert whole().status_code == 500
    message = "the engine failed: the engine process ended by signal SIGKILL"
    assert whole().json()["error"]["message"] == message
    assert f'"message":"{message}"' in stream().text
    health = httpx.get(f"{front.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    status, errors = front.end()
    assert status == 1
    assert "k3jax: the engine failed: the engine process ended by signal SIGKILL" in errors


def test_an_engine_that_cannot_start_says_why(start):
    status, errors = start("--max-context", "13").end(30)
    assert status == 1
    assert "the engine failed: ValueError: max_context 13 is unlucky" in errors


def test_the_engine_ends_with_its_front(start):
    front = start()
    front.wait_until_ready()
    engine = front.engine()
    front.process.kill()
    eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_flags():
    assert front_settings([]).model == bundled_model() == CHECKPOINT
    flags = "--port=0 --tp=2 --cache-memory=1.5GiB --builds=1x1,4x8 --dtype=float32"
    settings = front_settings(flags.split())
    assert settings.served_name == "k3-tiny"
    assert settings.worker.tp == 2
    assert settings.worker.cache_memory == 3 * 2**29
    assert settings.worker.builds == [(1, 1), (4, 8)]
    assert (settings.worker.dtype, settings.worker.max_requests) == ("float32", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on-fault", "restart"], "invalid choice: 'restart'"),
        (["--cache-memory", "lots"], "not an amount like 512MiB"),
        (["--builds", "4"], "not like 1x8"),
        (["--port", "70000"], "not a port"),
        (["--tp", "0"], "not a whole number above 0"),
        (["--drain-seconds", "-1"], "seconds"),
    ],
)
def test_a_wrong_flag_is_explained(capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert main(["--model", str(tmp_path)]) == 2
    assert "not a directory" in capsys.readouterr().err
