"""`python -m k3jax.serve` with the fake worker as its engine child."""

import asyncio
import dataclasses
import sys
from pathlib import Path

from k3jax.serve.__main__ import front_settings
from k3jax.serve.front import Front

if __name__ == "__main__":
    worker = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))
    settings = dataclasses.replace(front_settings(), worker_command=worker)
    sys.exit(asyncio.run(Front(settings).run()))
