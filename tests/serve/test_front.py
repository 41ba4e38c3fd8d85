"""The front as a process, with a fake engine child: start, drain, death."""

import json
import os
import re
import select
import shutil
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


def is_open(url):
    """Whether a front still takes connections."""
    try:
        return httpx.get(f"{url}/ready") is not None
    except httpx.TransportError:
        return False


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

    stream = in_thread(front.post, script("a" * 300, delay=0.1), stream=True)
    whole = in_thread(front.post, script("a" * 300, delay=0.1))
    front.wait_for_first_tokens(2)
    began = time.monotonic()
    front.process.terminate()
    status, errors = front.end()
    assert status == 0, errors
    assert "Traceback" not in errors
    assert time.monotonic() - began < 10
    assert "shut down before the end of the answer" in stream().text.splitlines()[-2]
    assert whole().status_code == 503


def test_a_second_signal_does_not_wait_for_open_requests(start):
    front = start()
    front.wait_until_ready()
    stream = in_thread(front.post, script("a" * 300, delay=0.1), stream=True)
    front.wait_for_first_tokens(1)
    front.process.terminate()
    eventually(lambda: not is_open(front.url))
    front.process.terminate()
    status, errors = front.end(10)
    assert (status, "Traceback" in errors) == (0, False), errors
    assert "shut down before the end of the answer" in stream().text


def test_a_long_tmpdir_does_not_break_the_engines_socket(start, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    start().wait_until_ready()


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"model_type": "kimi_k3", "text_config": {}}', "hidden_size is missing"),
        ("config.json", b"\xff", "is not JSON"),
        ("config.json", None, "does not exist"),
        ("tokenizer_config.json", b"\xff", "is not JSON"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "added_tokens_decoder is not"),
        ("tiktoken.model", None, "tiktoken.model"),
    ],
)
def test_a_broken_model_is_explained_in_a_line(capsys, tmp_path, name, content, message):
    for file in ("config.json", "tokenizer_config.json", "tiktoken.model"):
        shutil.copy(CHECKPOINT / file, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["--port=0", f"--model={tmp_path}"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_context_beyond_the_models(capsys):
    assert main(["--port=0", "--max-context=9999999"]) == 2
    assert "--max-context 9999999 exceeds the model's 1048576" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert main(["--model", str(tmp_path)]) == 2
    assert "not a directory" in capsys.readouterr().err
