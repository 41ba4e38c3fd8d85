"""The front as a process, with a fake engine child: start, drain, death."""

import gc
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from fake_engine import CHECKPOINT, TOKENIZER, script
from waiting import eventually

from k3jax.bundled import bundled_model
from k3jax.decode.watchdog import STEP_TIMEOUT_STATUS
from k3jax.serve.__main__ import front_settings, main
from k3jax.serve.client import EngineClient
from k3jax.serve.front import settle
from k3jax.serve.metrics import Metrics
from k3jax.serve.served import Served

FRONT = [sys.executable, str(Path(__file__).parent / "front_with_fake_worker.py")]
NEVER = "/never"  # a file for which an answer waits until it is cut short


class Process:
    """A running front; `url` once it has printed its address."""

    def __init__(self, *flags):
        self.process = subprocess.Popen(
            [*FRONT, "--model", str(CHECKPOINT), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(CHECKPOINT.parent.parent)},
        )
        self.url = ""

    def wait_until_ready(self):
        out = self.process.stdout
        assert select.select([out], [], [], 60)[0], "no address was printed"
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

        eventually(listening)
        eventually(process.children)

    def engine(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def get(self, path):
        return httpx.get(f"{self.url}/{path}", timeout=60)

    def post(self, prompt, **fields):
        body = {"prompt": prompt, "max_tokens": 400, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def wait_for_first_tokens(self, count):
        """Until so many requests, from the start on, have had their first token."""

        def came():
            return f"k3jax_ttft_seconds_count {float(count)}" in self.get("metrics").text

        eventually(came)

    def end(self, seconds=60):
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
        thread.join(120)
        return results[0]

    return result


def is_draining(front):
    """Whether a front says so, with a status that keeps new requests away."""
    reply = front.get("ready")
    return (reply.status_code, reply.json()["status"]) == (503, "draining")


def test_serve_and_drain(start, tmp_path):
    front, go = start("--drain-seconds", "300"), tmp_path / "go"
    front.wait_until_ready()
    assert front.post(script("héllo■")).json()["choices"][0]["text"] == "héllo"
    engine = front.engine()
    whole = in_thread(front.post, script("a" * 100, until=str(go)))
    stream = in_thread(front.post, script("b" * 100, until=str(go)), stream=True)
    front.wait_for_first_tokens(3)
    front.process.terminate()
    eventually(lambda: is_draining(front))
    refused = front.post("x")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    assert "k3jax_slots_in_use " in front.get("metrics").text
    go.touch()
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

    stream = in_thread(front.post, script("aa", until=NEVER), stream=True)
    whole = in_thread(front.post, script("aa", until=NEVER))
    front.wait_for_first_tokens(2)
    front.process.terminate()
    status, errors = front.end(25)  # unasked, the drain would take 30
    assert status == 0, errors
    assert "Traceback" not in errors
    assert "shut down before the end of the answer" in stream().text.splitlines()[-2]
    assert whole().status_code == 503


def test_a_second_signal_does_not_wait_for_open_requests(start):
    front = start("--drain-seconds", "300")
    front.wait_until_ready()
    stream = in_thread(front.post, script("aa", until=NEVER), stream=True)
    front.wait_for_first_tokens(1)
    front.process.terminate()
    eventually(lambda: is_draining(front))
    front.process.terminate()
    status, errors = front.end()
    assert (status, "Traceback" in errors) == (0, False), errors
    assert "shut down before the end of the answer" in stream().text


def test_a_long_tmpdir_does_not_break_the_engines_socket(start, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    start().wait_until_ready()


def test_health_and_progress_while_the_engine_loads(start):
    front = start("--page-size", "60000")  # the fake worker loads for ten minutes
    front.wait_for_port()
    eventually(lambda: front.get("health").status_code == 200)
    eventually(lambda: "fake worker loads" in front.get("ready").text)
    assert front.get("ready").status_code == 503
    assert front.post("x").status_code == 503
    engine = front.engine()
    front.process.terminate()
    status, errors = front.end()
    assert status == 0
    assert f"fake worker loads {CHECKPOINT}" in errors
    assert not engine.is_running()


def test_the_death_of_the_engine(start, monkeypatch):
    monkeypatch.setenv("FAILURE_SECONDS", "5")  # a busy machine takes a while to ask
    front = start()
    front.wait_until_ready()
    whole = in_thread(front.post, script("aa", until=NEVER))
    streams = [in_thread(front.post, script("bb", until=NEVER), stream=True) for _ in range(50)]
    front.wait_for_first_tokens(51)
    front.engine().kill()
    assert whole().status_code == 500
    health = front.get("health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    message = "the engine failed: the engine process ended by signal SIGKILL"
    assert whole().json()["error"]["message"] == message
    for stream in streams:
        *texts, error = stream().text.strip().split("\n\n")
        assert f'"message":"{message}"' in error
        assert texts
        assert not any('"error"' in text or "[DONE]" in text for text in texts)
    status, errors = front.end()
    assert status == 1
    assert "k3jax: the engine failed: the engine process ended by signal SIGKILL" in errors


def test_an_engine_that_failed_is_followed_by_another(start, tmp_path):
    front, go = start("--on-fault", "restart"), tmp_path / "go"
    front.wait_until_ready()
    say = "".join(f"{number:03}," for number in range(75))
    open_requests = [
        in_thread(front.post, script(say, until=str(go)), stream=True),
        in_thread(front.post, script(say, until=str(go)), logprobs=0),
        in_thread(front.post, script(say, until=str(go)), n=2),
    ]
    front.wait_for_first_tokens(4)
    first = front.engine()
    first.kill()
    restarts = 'k3jax_engine_restarts_total{cause="process"} 1.0'
    eventually(lambda: restarts in front.get("metrics").text)
    eventually(lambda: front.get("ready").status_code == 200)
    go.touch()
    stream, scored, twice = (reply() for reply in open_requests)
    events = [json.loads(line[6:]) for line in stream.text.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == say
    (choice,) = scored.json()["choices"]
    assert choice["text"] == say
    assert choice["logprobs"]["tokens"] == [*say, "<|end_of_msg|>"]
    assert scored.json()["usage"]["completion_tokens"] == len(say) + 1
    assert [choice["text"] for choice in twice.json()["choices"]] == [say, say]
    assert front.engine().pid != first.pid
    assert front.post(script("again■")).json()["choices"][0]["text"] == "again"
    text = front.get("metrics").text
    assert restarts in text
    assert "k3jax_fallback 0.0" in text
    assert 'k3jax_health{rank="0"} 0.0' in text
    front.process.terminate()
    status, errors = front.end()
    assert status == 0, errors
    assert "ended by signal SIGKILL; another one starts\n" in errors
    assert errors.count("for None") == 2  # the backend is as it was


@pytest.mark.parametrize("told", [{"fail_stop": True}, {"die": STEP_TIMEOUT_STATUS}])
def test_an_engine_whose_kernels_failed_is_followed_by_one_on_the_stock_path(start, told):
    front = start("--on-fault", "restart", "--decode-backend", "auto")
    front.wait_until_ready()
    stream = in_thread(front.post, script("a" * 100, until=NEVER), stream=True)
    front.wait_for_first_tokens(1)
    assert front.post(script("b", **told)).status_code == 500  # the second and third die of it, too
    assert stream().text.count('"error"') == 1
    eventually(lambda: front.get("ready").status_code == 200)
    assert front.post(script("again■")).json()["choices"][0]["text"] == "again"
    health = front.get("health").json()
    assert health["status"] == "ready"
    assert "on the stock path since one failed: " in health["detail"]
    text = front.get("metrics").text
    assert 'k3jax_engine_restarts_total{cause="kernels"} 3.0' in text
    assert "k3jax_fallback 1.0" in text
    front.process.terminate()
    status, errors = front.end()
    assert status == 0, errors
    assert (errors.count("for auto"), errors.count("for stock")) == (1, 3)
    assert "another one starts on the stock path (--decode-backend stock)" in errors


def test_an_operator_who_asked_for_kernels_alone_is_not_given_another_path(start):
    front = start("--on-fault", "restart", "--decode-backend", "specialized")
    front.wait_until_ready()
    stream = in_thread(front.post, script("aa", until=NEVER), stream=True)
    front.wait_for_first_tokens(1)
    response = front.post(script("b", fail_stop=True))
    message = "the engine failed: rank 0 has health word 0x1"
    assert (response.status_code, response.json()["error"]["message"]) == (500, message)
    assert stream().text.count(f'"message":"{message}"') == 1
    status, errors = front.end()
    assert status == 1
    assert "no other engine starts: --decode-backend specialized allows no other path" in errors
    assert errors.count("fake worker loads") == 1


def test_a_fault_that_comes_again_at_once_ends_the_server(start):
    """Three engines die of the first request, and no more than two others of the next."""
    front = start("--on-fault", "restart")
    front.wait_until_ready()
    response = front.post(script("a", die=7))
    assert response.status_code == 500
    assert "ended with status 7" in response.json()["error"]["message"]
    eventually(lambda: front.get("ready").status_code == 200)
    assert '_restarts_total{cause="process"} 3.0' in front.get("metrics").text
    assert front.post(script("a", die=7)).status_code == 500
    status, errors = front.end()
    assert status == 1
    assert "no other engine starts: 5 engines failed within" in errors
    assert errors.count("fake worker loads") == 6


def test_an_engine_that_was_never_ready_is_not_started_again(start):
    status, errors = start("--on-fault", "restart", "--max-context", "13").end()
    assert status == 1
    assert errors.count("max_context 13 is unlucky") == 1


def test_an_engine_that_cannot_start_says_why(start):
    status, errors = start("--max-context", "13").end()
    assert status == 1
    assert "the engine failed: ValueError: max_context 13 is unlucky" in errors


def test_the_engine_ends_with_its_front(start):
    front = start()
    front.wait_until_ready()
    engine = front.engine()
    front.process.kill()
    eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_no_collection_walks_what_is_loaded():
    served = Served("k3-tiny", TOKENIZER, EngineClient(None, Metrics()))
    try:
        settle(served)
        assert "guides" in vars(served)
        assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_flags():
    assert front_settings([]).model == bundled_model() == CHECKPOINT.parent / "k3-nano"
    flags = "--port=0 --tp=2 --cache-memory=1.5GiB --builds=1x1,4x8 --dtype=float32"
    settings = front_settings(flags.split())
    assert settings.served_name == "k3-nano"
    assert settings.worker.tp == 2
    assert settings.worker.cache_memory == 3 * 2**29
    assert settings.worker.prefix_cache is None
    assert front_settings(["--prefix-cache=off"]).worker.prefix_cache == 0
    assert front_settings(["--prefix-cache=2G"]).worker.prefix_cache == 2 * 10**9
    assert settings.worker.builds == [(1, 1), (4, 8)]
    assert (settings.worker.dtype, settings.worker.max_requests) == ("float32", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on-fault", "pray"], "invalid choice: 'pray'"),
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
    assert "--max-context 9999999 exceeds the model's 8192" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert main(["--model", str(tmp_path)]) == 2
    assert "not a directory" in capsys.readouterr().err
