"""`python -m k3jax.serve` with the fake worker as its engine child."""

import asyncio
import dataclasses
import os
import sys
from pathlib import Path

from k3jax.serve import front
from k3jax.serve.__main__ import front_settings

if __name__ == "__main__":
    worker = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))
    settings = dataclasses.replace(front_settings(), worker_command=worker)
    front.FAILURE_SECONDS = float(os.environ.get("FAILURE_SECONDS", front.FAILURE_SECONDS))
    sys.exit(asyncio.run(front.Front(settings).run()))
