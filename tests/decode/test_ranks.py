"""Two and four processes: a refusal or a fault of one is raised by all, and none hangs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import EVERY

LIMIT = 150  # seconds until SIGKILL: the coordination service of JAX swallows SIGTERM
LAG = 3
HERE = Path(__file__).parent


def start(ranks):
    """Run ranks.py in that many processes; what each printed, and each exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(HERE / "ranks.py"), address, str(ranks)]
    children = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    try:
        results = [child.communicate(timeout=LIMIT) for child in children]
    finally:
        for child in children:
            child.kill()
    errors = b"\n".join(error for _, error in results).decode(errors="replace")
    assert [child.returncode for child in children] == [0] * ranks, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in results]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_and_stop_together(ranks):
    found = start(ranks)
    last = ranks - 1
    start_of = "Kimi-K3 specialized decode does not support"
    end = "(--decode-backend auto runs the stock path)"
    for rank, own in enumerate(found):
        assert own["fine"] is None
        reasons = "a; b" if rank == last else f"another rank refused (rank {last})"
        assert own["last"] == f"{start_of} these weights: {reasons} {end}"
        assert own["all"] == f"{start_of} this cache: reason of {rank} {end}"
        assert own["minimum"] == 100 - last
        assert own["buffers"] == [[1], [1], [[1 + rank]] * 3]
        assert own["fine again"] is None
        assert "start all ranks with the same command" in own["apart"][0]
        if rank != last:
            text, seconds = own["silent"]
            assert f"rank {last} did not say within 1 s whether it agrees on the end" in text
            assert seconds < 20
    # One and the same step, and word for word the same error, on every rank.
    number, reads, text = found[0]["stop"]
    assert all(own["stop"] == found[0]["stop"] for own in found)
    assert 21 < number - 1 <= 21 + EVERY + LAG
    assert reads == number - 1
    assert text.startswith(f"all ranks stop at step {number - 1}: rank 1 has health word 0x10 ")
    assert "since step 21 (ranks that chose different experts)" in text
