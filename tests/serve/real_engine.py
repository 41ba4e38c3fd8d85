"""A server of k3-tiny with a real engine, as a process."""

import os
import socket
import subprocess
import sys

import httpx
import psutil
from fake_engine import CHECKPOINT


def free_port():
    """A port that nobody had a moment ago, for who cannot be given 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    """A server of a real engine; `said` is its log so far."""

    def __init__(self, folder, slots, *flags):
        """It has compiled one decode step, for `slots` requests."""
        self.log = folder / "log"
        command = f"-m k3jax.serve --model {CHECKPOINT} --port 0 --log none --max-requests {slots} "
        command += f"--builds 1x{slots} --compile-cache {os.environ['JAX_COMPILATION_CACHE_DIR']} "
        command += " ".join(flags)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(CHECKPOINT.parent.parent)},
            )
        line = self.process.stdout.readline()
        assert " at http://" in line, self.said()
        self.url = line.partition(" at ")[2].partition("/v1")[0]

    def said(self):
        return self.log.read_text()

    def child(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def get(self, path):
        return httpx.get(f"{self.url}/{path}", timeout=30)

    def metric(self, name):
        lines = self.get("metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])

    def close(self):
        """The engine ends by itself within a second of its front."""
        with self.process:
            self.process.kill()
