"""The engine child: its loop on fakes, and the process with a real model, alone and orphaned."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from fakes import FakeExecutor, config, continuation

from k3jax.decode.config import DecodeConfig
from k3jax.engine import Engine
from k3jax.request import Request, SamplingParams
from k3jax.serve import worker
from k3jax.serve.link import (
    Abort,
    Add,
    Deltas,
    Fatal,
    Progress,
    Ready,
    Shutdown,
    ToFront,
    Trace,
    Traced,
    WorkerSettings,
)
from k3jax.serve.worker import Server, decode_config_of

ROOT = Path(__file__).parent.parent.parent
RUN = DecodeConfig(max_requests=2, max_context=64, page_size=4, prefill_buckets=((1, 16),))
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


class ScriptedEnd:
    """The socket's end with messages by turn: one list for each call of `receive`."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.sent = []

    def receive(self, timeout=0.0):
        return self.turns.pop(0) if self.turns else []

    def send(self, message):
        self.sent.append(message)

    def texts(self):
        texts, ends = {}, {}
        for message in self.sent:
            for delta in message.deltas:
                texts.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason:
                    ends[delta.request_id] = delta
        return texts, ends


def run_server(*turns):
    engine = Engine(FakeExecutor(RUN, pages=40), config(), RUN)
    end = ScriptedEnd(*turns)
    Server(engine, end).run()
    return end, engine


def add(name, prompt, params=PARAMS):
    return Add(Request(request_id=name, prompt_ids=prompt, params=params))


def test_profiles_steps(tmp_path):
    two, again = Trace(2, str(tmp_path / "a")), Trace(1, str(tmp_path / "b"))
    end, _ = run_server([add("a", [1, 2]), two, again], [], [], [Shutdown(drain=True)])
    answers = [message for message in end.sent if isinstance(message, Traced)]
    assert [answer.error for answer in answers] == [
        "a profile is being taken: 2 steps are missing",
        None,
    ]
    assert list((tmp_path / "a").rglob("*.xplane.pb"))
    assert not (tmp_path / "b").exists()


def test_drains_open_requests_and_refuses_new_ones():
    end, engine = run_server([add("a", [1, 2])], [Shutdown(drain=True), add("late", [3])])
    texts, ends = end.texts()
    assert texts["a"] == continuation([1, 2], 5, stops=())[0]
    assert ends["a"].finish_reason == "length"
    assert ends["late"].finish_reason == "error"
    assert "shutting down" in ends["late"].error
    assert not engine.has_work()
    last = end.sent[-1].stats
    assert (last.slots_in_use, last.pages_in_use, last.finished) == (0, 0, {"length": 1})


def test_a_shutdown_without_drain_ends_at_once():
    end, engine = run_server([add("a", [1, 2])], [], [Shutdown()])
    assert engine.has_work()
    assert end.texts()[1] == {}


def test_a_refused_request_gets_an_error_and_the_others_go_on():
    end, _ = run_server(
        [add("bad", [1] * 64), add("good", [5])], [], [], [Abort("good")], [Shutdown(drain=True)]
    )
    _, ends = end.texts()
    assert ends["bad"].finish_reason == "error"
    assert "1 to 63 tokens" in ends["bad"].error
    assert ends["bad"].prompt_tokens == 64
    assert ends["good"].finish_reason == "abort"


class Anything:
    """A grammar that allows all tokens."""

    error = None

    def fill(self, mask, drafts=()):
        mask[:] = 0xFFFFFFFF

    def advance(self, tokens):
        pass


class Grammars:
    """Compiles a grammar once it is let; those that were begun, and in which threads."""

    def __init__(self):
        self.let = threading.Event()
        self.begun, self.threads = [], set()

    def __call__(self, grammar):
        self.begun.append(grammar)
        self.threads.add(threading.get_ident())
        assert self.let.wait(30)
        if grammar == "wrong":
            raise ValueError("a wrong grammar")
        return Anything()


class LateEnd(ScriptedEnd):
    """Lets grammars be compiled once some request has ended, then drains when all have."""

    def __init__(self, grammars, after, turn):
        super().__init__(turn)
        self.grammars, self.after = grammars, after

    def send(self, message):
        super().send(message)
        if self.after in self.texts()[1] and not self.grammars.let.is_set():
            assert "slow" not in self.texts()[0]
            self.turns.append([Abort("gone"), Shutdown(drain=True)])
            self.grammars.let.set()


def test_others_go_on_while_a_grammar_is_compiled():
    """So it is compiled beside the steps; an abort meanwhile and a drain after it are heeded."""
    grammars = Grammars()
    engine = Engine(
        FakeExecutor(RUN, pages=40), config(), RUN, guides=SimpleNamespace(matcher=grammars)
    )
    held = {
        name: add(name, [7, 8], msgspec.structs.replace(PARAMS, grammar=name))
        for name in ("slow", "wrong", "gone")
    }
    end = LateEnd(grammars, "other", [*held.values(), add("other", [1, 2])])
    Server(engine, end).run()
    texts, ends = end.texts()
    assert texts["other"] == continuation([1, 2], 5, stops=())[0]
    assert texts["slow"] == continuation([7, 8], 5, stops=())[0]
    assert (ends["wrong"].finish_reason, ends["wrong"].error) == ("error", "a wrong grammar")
    assert "gone" not in ends
    assert threading.get_ident() not in grammars.threads
    assert not engine.has_work()


@pytest.mark.parametrize(("asked", "used"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_a_cpu_computes_in_float32_unless_told_otherwise(monkeypatch, asked, used):
    monkeypatch.setattr(worker, "Executor", lambda *given, **_: given[2])
    monkeypatch.setattr(worker, "load_params", lambda *_, **__: None)
    model = str(ROOT / "checkpoints" / "k3-tiny")
    settings = WorkerSettings(address="", parent=0, model=model, dtype=asked)
    assert worker.load_executor(settings, lambda text: None).dtype == used


def test_compiled_kernels_are_refused_on_a_cpu_before_anything_is_loaded():
    model = str(ROOT / "checkpoints" / "k3-tiny")
    settings = WorkerSettings(address="", parent=0, model=model, impl="pallas")
    told = []
    with pytest.raises(ValueError, match="impl pallas needs a GPU"):
        worker.load_executor(settings, told.append)
    assert not told


def test_settings_that_are_not_given_keep_the_defaults():
    settings = WorkerSettings(address="", parent=1, model="", dtype="float32", builds=[(1, 16)])
    run = decode_config_of(settings)
    assert (run.dtype, run.builds) == ("float32", ((1, 16),))
    assert run.page_size == DecodeConfig().page_size


class Front:
    """The front's end of a real socket and the worker behind it."""

    def __init__(self, directory, model, **fields):
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        address = f"ipc://{directory}/link"
        self.socket.bind(address)
        settings = WorkerSettings(address=address, parent=os.getpid(), model=str(model), **fields)
        text = msgspec.json.encode(settings).decode()
        command = [sys.executable, "-m", "k3jax.serve.worker", text]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)

    def send(self, message):
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self, seconds=600):  # it compiles meanwhile
        assert self.socket.poll(seconds * 1000), "the worker is silent"
        return msgspec.msgpack.decode(self.socket.recv(), type=ToFront)

    def close(self):
        self.process.kill()
        self.process.communicate()
        self.socket.close(linger=0)


@pytest.fixture
def front(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(model, **fields):
            started = Front(tmp_path, model, **fields)
            stack.callback(started.close)
            return started

        yield start


def test_a_real_worker_serves_and_ends_with_status_0(front, golden):
    """Progress, Ready, deltas of a request, then an orderly end; SIGINT is the front's affair."""
    worker = front(
        golden / "k3-tiny-a", dtype="float32", max_requests=1, max_context=32, page_size=8
    )
    messages = [worker.receive()]
    while isinstance(messages[-1], Progress):
        messages.append(worker.receive())
    assert isinstance(messages[-1], Ready), messages[-1]
    info = messages[-1].info
    assert (info.model, info.vocab_size, info.max_context, info.slots) == ("k3-tiny-a", 512, 32, 1)
    assert any("loaded layers.0" in message.text for message in messages[:-1])
    assert any("compiled decode" in message.text for message in messages[:-1])
    worker.process.send_signal(signal.SIGINT)
    worker.send(add("a", [3, 1, 4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    deltas = []
    while not (deltas and deltas[-1].finish_reason):
        message = worker.receive()
        assert isinstance(message, Deltas)
        deltas += message.deltas
    assert sum(len(delta.token_ids) for delta in deltas) == 4
    worker.send(Shutdown(drain=True))
    assert worker.process.wait(60) == 0


def test_a_worker_that_cannot_load_says_why_and_fails(front, tmp_path):
    worker = front(tmp_path / "nothing")
    message = worker.receive()
    assert isinstance(message, Fatal)
    assert "nothing" in message.text
    assert worker.process.wait(60) == 1
    assert b"Traceback" not in worker.process.stderr.read()


def test_an_orphan_ends_by_itself():
    """The process ends within seconds of a parent that was killed without a word."""
    child = "import os, sys, time\nfrom k3jax.serve.worker import end_with_parent\n"
    child += "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)"
    parent = "import os, subprocess, sys, time\n"
    parent += f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
    parent += "time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        orphan = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while alive(orphan):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def alive(process):
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
