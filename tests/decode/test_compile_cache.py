"""With a compile cache the second start of an engine compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "start.py"


def test_a_second_start_compiles_nothing(golden, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    command = [sys.executable, str(SCRIPT), str(golden / "k3-tiny-a"), str(tmp_path)]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append([int(word) for word in done.stdout.split()])
    steps, _, misses = found[0]
    assert misses > steps > 2
    steps, hits, misses = found[1]
    assert (hits, misses) == (found[0][2], 0)
