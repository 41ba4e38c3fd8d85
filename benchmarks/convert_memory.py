"""Peak host memory and speed of a conversion: `python -m benchmarks.convert_memory`.

Makes a random checkpoint of the released Kimi-K3 layout (--gib, 4 by default) in a temporary
directory, converts it to Orbax and back in processes of their own, and prints each one's peak
resident memory above that of a process that only imports the converter. A conversion holds one
stacked tensor (a layer's experts' w1, say), its header data and a few chunks of 32 MiB, so the
peak grows with a layer, not with the model. The bar is --limit GiB. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.checkpoint.export import save_hf
from k3jax.config import K3Config
from k3jax.logical import group_params
from k3jax.sizes import bytes_at_rest

ROOT = Path(__file__).parent.parent
GIB = 2**30
REPORT_PEAK = """
import sys
from k3jax.convert import main
code = main(sys.argv[1:]) if sys.argv[1:] else 0
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) * 1024)
sys.exit(code)
"""


class RandomModel:
    """A model of random values, made when they are read."""

    def __init__(self, config: K3Config) -> None:
        self.config = config
        self._random = np.random.default_rng(0)

    def read(self, group: str, name: str) -> np.ndarray:
        spec = group_params(self.config, group)[name]
        if spec.dtype == "u8":  # 100..139 where they are scales; any byte is two codes
            block = self._random.integers(100, 140, 1 << 20, dtype=np.uint8)
            return np.resize(block, spec.shape)
        dtype = ml_dtypes.bfloat16 if spec.dtype == "bf16" else np.float32
        return np.resize(self._random.standard_normal(1 << 16), spec.shape).astype(dtype)


def small_k3(gib: float, layers: int) -> dict[str, Any]:
    """The released config.json with narrower layers, and experts to fill `gib`."""
    raw = json.loads((ROOT / "tests" / "data" / "k3-config.json").read_text())
    text = raw["text_config"]
    text |= {
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "vocab_size": 32768,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "routed_expert_hidden_size": 2048,
        "moe_intermediate_size": 2048,
        "num_experts": 16,
    }
    text["linear_attn_config"] |= {
        "num_heads": 16,
        "kda_layers": list(range(1, layers)),
        "full_attn_layers": [layers],
    }
    without = bytes_at_rest(K3Config.from_dict(raw))
    expert = 3 * 2048 * 2048 * 17 // 32
    text["num_experts"] += max(0, round((gib * GIB - without) / (expert * (layers - 1))))
    return raw


def peak(*arguments: str) -> tuple[int, float]:
    """Peak resident bytes, and seconds, of a process that imports the converter and runs it."""
    start = time.perf_counter()
    command = [sys.executable, "-c", REPORT_PEAK, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout), time.perf_counter() - start


def main() -> int:
    """Measure both directions; 1 if a peak is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=1.5)
    options = parser.parse_args()
    raw = small_k3(options.gib, options.layers)
    config = K3Config.from_dict(raw)
    size = bytes_at_rest(config)
    results = {"gib": size / GIB, "layers": options.layers, "limit_gib": options.limit}
    with tempfile.TemporaryDirectory() as name:
        made, orbax, back = (Path(name) / each for each in ("made", "orbax", "back"))
        save_hf(RandomModel(config), made, lambda group, bytes_done: None)
        (made / "config.json").write_text(json.dumps(raw))
        baseline, imports = peak()
        largest = max(spec.nbytes for spec in group_params(config, "layers.1").values())
        print(
            f"{size / GIB:.2f} GiB, {options.layers} layers, the largest stacked tensor "
            f"{largest / GIB:.2f} GiB; importing takes {baseline / GIB:.2f} GiB",
            flush=True,
        )
        for to, arguments in (
            ("orbax", (str(made), str(orbax))),
            ("hf", (str(orbax), str(back), "--to", "hf")),
        ):
            bytes_peak, seconds = peak(*arguments)
            above = (bytes_peak - baseline) / GIB
            speed = size / 1e9 / (seconds - imports)
            row = f"to {to:5}  {above:.2f} GiB above (limit {options.limit}), {speed:.2f} GB/s"
            print(row, flush=True)
            results |= {f"{to}_peak_gib": above, f"{to}_gb_per_second": speed}
    print(json.dumps(results))
    return int(max(results["orbax_peak_gib"], results["hf_peak_gib"]) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
