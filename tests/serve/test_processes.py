"""A rank in each process: the text of one, an orderly end, and the death of any.

Most are of two processes; those of four are slow, since each compiles all steps.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import httpx
import msgspec
import numpy as np
import pytest
import zmq
from fake_engine import CHECKPOINT, TOKENIZER
from real_engine import free_port
from waiting import eventually

from k3jax.checkpoint.loading import open_checkpoint
from k3jax.checkpoint.saving import save_orbax
from k3jax.config import K3Config
from k3jax.logical import group_params, groups
from k3jax.serve import ranks
from k3jax.serve.__main__ import main

START = 300  # seconds for each process to load and compile, or to answer, on two busy cores
LIMIT = 30  # seconds for all processes to end after one died


def widened(directory):
    """The first layers of k3-tiny, with experts that are wide enough for four ranks."""
    raw = json.loads((CHECKPOINT / "config.json").read_text())
    text = raw["text_config"]
    text |= {"num_hidden_layers": 4, "moe_intermediate_size": 2 * text["moe_intermediate_size"]}
    text["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    config = K3Config.from_dict(raw)
    with open_checkpoint(CHECKPOINT, K3Config.from_file(CHECKPOINT)) as narrow:
        arrays = [
            (
                group,
                {
                    name: np.resize(narrow.read(group, name), spec.shape)
                    for name, spec in group_params(config, group).items()
                },
            )
            for group in groups(config)
        ]
    save_orbax(directory, raw, arrays, files_from=CHECKPOINT)
    return directory


class Ranks:
    """The processes of one server, the first with the front."""

    def __init__(self, folder, *more, models=(CHECKPOINT, CHECKPOINT)):
        """Rank n serves models[n]; `more` are flags of all."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.logs = [folder / f"rank{rank}.log" for rank in range(len(models))]
        flags = (
            f"--port {port} --dtype float32 --tp {len(models)} --max-requests 1 --max-context 48 "
        )
        flags += "--builds 1x1 --compile-cache none "
        flags += f"--coordinator 127.0.0.1:{free_port()} --num-processes {len(models)} "
        flags += "--process-id"
        environment = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1 "
            "--xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(CHECKPOINT.parent.parent),
        }
        command = [sys.executable, "-m", "k3jax.serve", *more, *flags.split()]
        self.processes = []
        for rank, path in enumerate(self.logs):
            own = [*command, str(rank), "--model", str(models[rank])]
            with path.open("w") as log:
                self.processes.append(
                    subprocess.Popen(own, stdout=log, stderr=log, env=environment)
                )

    def wait_until_ready(self):
        deadline = time.monotonic() + START * len(self.processes)
        while not self.ready():
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.2)

    def ready(self):
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def said(self):
        return "\n\n".join(path.read_text() for path in self.logs)

    def wait(self, seconds=LIMIT):
        """The status of each process, once all have ended."""
        return [process.wait(seconds) for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    """Start ranks and wait until they serve."""
    started = []

    def ready(*flags, count=2):
        model = CHECKPOINT if count == 2 else widened(tmp_path / "wide")
        started.append(Ranks(tmp_path, *flags, models=(model,) * count))
        started[0].wait_until_ready()
        return started[0]

    yield ready
    for ranks_of_one in started:
        ranks_of_one.kill()


COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


def test_a_rank_that_cannot_read_its_checkpoint_is_heard_by_all(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    pair = Ranks(tmp_path, models=(CHECKPOINT, broken))
    try:
        front, other = pair.wait(300)
    finally:
        pair.kill()
    assert front == 1, pair.said()
    assert other != 0
    assert "the engine failed: another rank refused (rank 1)" in pair.logs[0].read_text()
    assert shard.name in pair.logs[1].read_text()


@pytest.fixture(scope="module")
def recorded(golden):
    """(prompt, text, its ids) of the same weights by another implementation."""
    with np.load(golden / "k3-tiny-a" / "golden.npz") as arrays:
        prompt = arrays["seq1.input_ids"].tolist()
        ids = arrays["seq1.greedy"].tolist()
        return prompt, TOKENIZER.decode(ids), ids


def ask(pair, prompt, tokens, **fields):
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return f"{pair.url}/v1/completions", {"json": body | fields, "timeout": START}


def test_the_text_of_one_process_and_an_orderly_end(start, recorded):
    """Both processes go on from a prefix as well."""
    pair = start("--page-size", "8")
    prompt, text, ids = recorded
    for known, cached in [(0, 0), (12, len(prompt))]:
        tokens = [*prompt, *ids[:known]]
        url, options = ask(pair, tokens, len(ids) - known, skip_special_tokens=False)
        reply = httpx.post(url, **options).json()
        assert reply["choices"][0]["text"] == text[len(TOKENIZER.decode(ids[:known])) :]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    pair.processes[0].terminate()
    assert pair.wait() == [0, 0], pair.said()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "tokens"),
    [
        (2, 32),
        pytest.param(2, 40, marks=pytest.mark.slow),
        pytest.param(4, 40, marks=pytest.mark.slow),
    ],
)
def test_a_fault_on_one_rank_stops_all_at_one_step(start, recorded, count, tokens):
    """Also where the votes come with the last step of all: 32 tokens take 32 steps."""
    guilty = count - 1
    group = start("--inject-fault", f"{guilty}:20:wait", count=count)
    url, options = ask(group, recorded[0][:4], tokens)
    said = httpx.post(url, **options).json()["error"]["message"]
    stop = f"all ranks stop at step 32: rank {guilty} has health word 0x1 since step 20"
    assert said.startswith(f"the engine failed: {stop}")
    assert group.wait() == [1] * count
    assert all(stop in path.read_text() for path in group.logs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_that_is_killed_takes_all_along(start, recorded, count):
    """Open requests hear of it, probes too, and every process ends with a message."""
    group = start(count=count)
    url, options = ask(group, recorded[0][:4], 40, stream=True)
    lines = []
    with httpx.Client(base_url=group.url, timeout=START) as probe:
        assert probe.get("/health").status_code == 200  # connected: the front soon takes no others
        with httpx.stream("POST", url, **options) as response:
            for line in response.iter_lines():
                if not lines:
                    group.processes[-1].send_signal(signal.SIGKILL)
                    killed = time.monotonic()
                lines.append(line)
        health = probe.get("/health").status_code
    assert '"error":{"message":"the engine failed' in lines[-2], lines[-4:]
    assert health == 503
    statuses = group.wait()
    seconds = time.monotonic() - killed
    assert all(statuses[:-1]), group.said()
    assert statuses[-1] == -signal.SIGKILL
    assert seconds < LIMIT
    assert "the engine failed" in group.logs[0].read_text()
    print(f"\n{count} processes ended {seconds:.1f} s after one of them was killed: {statuses}")


@pytest.fixture
def peers(monkeypatch):
    """Two ends, each named after the other, and what their threads said; the test closes one."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(ranks, "POLL_MILLISECONDS", 20)
    context, said = zmq.Context(), []
    ends = [ranks.Peer(context, f"rank {1 - n}", said.append) for n in range(2)]
    ends[1].connect(ends[0].bind("127.0.0.1"))
    ends[0].send(msgspec.msgpack.encode(ranks.Stop()))
    assert ends[1].receive() == ranks.Stop()  # so they are connected
    yield ends, said
    ends[1].close()
    context.term()


def test_a_lost_connection_ends_the_process(peers):
    ends, said = peers
    ends[0].close()
    eventually(lambda: said)
    assert said == ["rank 0 ended; its own log says why. Restart all ranks"]


def test_an_orderly_end_is_none(peers):
    ends, said = peers
    ends[1].leave()  # its thread has ended
    ends[0].close()
    assert said == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--process-id 1", "--num-processes and --process-id need --coordinator HOST:PORT"),
        ("--coordinator here", "--coordinator here is not like HOST:PORT"),
        ("--coordinator a:1 --on-fault restart", "let a supervisor start all ranks"),
        ("--coordinator a:1 --tp 2", "--tp 2 has one process for each rank"),
        ("--coordinator a:1 --tp 2 --num-processes 2 --process-id 2", "--process-id 2 (from 0)"),
    ],
)
def test_ranks_that_do_not_add_up(flags, message, capsys):
    assert main(flags.split()) == 2
    assert message in capsys.readouterr().err
