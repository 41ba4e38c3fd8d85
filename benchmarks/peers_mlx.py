"""k3jax beside mlx_lm on one exported checkpoint, on this CPU: `python -m benchmarks.peers_mlx`.

`greedy` compares greedy texts in float32, token for token, from text to text: an independent
implementation reads the files that `k3jax.convert --to hf` wrote, the tokenizer.json too.
`serve` measures both servers over HTTP in turns: requests and tokens per second at each
concurrency, medians over the repeats. The last line is JSON. mlx_lm may be installed elsewhere:
--peer names the Python that has it. Without it, a line says so and nothing is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.progress import Progress, add_limit
from benchmarks.serve import level, running

PROMPTS = (
    "Hello",
    "import os\n\n\ndef main() -> None:\n",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "深度學習模型 и ещё немного текста 🙂",
    "class Tokenizer:\n    def __init__(self, ranks):\n        self.ranks = ranks\n" * 6,
    "1 + 1 = 2, 2 + 2 = 4, 12 * 12 =",
)


def installed(peer: str) -> bool:
    """Whether that Python has mlx_lm."""
    command = [peer, "-c", "import mlx_lm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compare_greedy(options: argparse.Namespace) -> bool:
    """Whether all texts are the same; prints each, and the gap where one parts.

    RuntimeError if the peer fails, ValueError for a checkpoint without a tokenizer.
    """
    import k3jax  # the server's comparison needs no JAX in this process

    asked = {"model": options.model, "prompts": PROMPTS, "tokens": options.tokens}
    script = str(Path(__file__).with_name("mlx_greedy.py"))
    answer = subprocess.run(
        [options.peer, script], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise RuntimeError(f"the peer failed:\n{answer.stderr}")
    lm = k3jax.load(options.model, dtype="float32", max_context=2048)
    if lm.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: there are no ids to compare")
    results = []
    for prompt, (peer_ids, theirs) in zip(
        PROMPTS, json.loads(answer.stdout.splitlines()[-1]), strict=True
    ):
        ids = lm.tokenizer.encode(prompt)
        ours = lm.generate(ids, max_tokens=options.tokens, ignore_eos=True)
        same = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours)
        )
        result = {"prompt_tokens": len(ids), "same_ids": ids == peer_ids, "same_tokens": same}
        if same < len(ours):
            best = sorted(lm.logits(ids + ours[:same])[-1])[-2:]
            result["gap"] = float(best[1] - best[0])
        results.append(result)
        print(f"{prompt[:24]!r:>30} {result}", flush=True)
    equal = all(each["same_ids"] and each["same_tokens"] == options.tokens for each in results)
    print(json.dumps({"benchmark": "peers_mlx greedy", "equal": equal, "results": results}))
    return equal


def compare_servers(options: argparse.Namespace) -> int:
    """Measure both servers in turns and print a table; 1 if not everything was measured."""
    progress = Progress(options.minutes)
    widest = str(max(options.concurrency))
    ours = ["--log", "none", "--max-requests", widest, *options.server_arguments]
    theirs = ["--log-level", "ERROR", "--decode-concurrency", widest]
    commands = {
        "k3jax": [sys.executable, "-m", "k3jax.serve", *ours],
        "mlx_lm": [options.peer, "-m", "mlx_lm", "server", *theirs],
    }
    paths = {"k3jax": "/ready", "mlx_lm": "/health"}
    ports = {name: options.port + number for number, name in enumerate(commands)}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as servers:
        for name, command in commands.items():
            command += ["--model", options.model, "--port", str(ports[name])]
            servers.enter_context(running(command, urls[name], paths[name], options.patience))
        for repeat in range(options.repeats):
            for concurrency in options.concurrency:
                for name in sorted(commands, reverse=bool(repeat % 2)):
                    title = f"{name}, {concurrency} clients, repeat {repeat}"
                    if not progress.in_time(title):
                        continue
                    options.seed = repeat  # prompts that neither has cached, the same for both
                    with progress.case(title):
                        result = asyncio.run(level(urls[name], concurrency, options))
                        found.setdefault((name, concurrency), []).append(result)
                        line = " ".join(f"{key} {value:.2f}" for key, value in result.items())
                        print(f"{name:>8} {line}", flush=True)
    print(f"{'clients':>8} {'requests/s':>20} {'tokens/s':>20} {'TTFT ms':>20} {'TPOT ms':>20}")
    medians = []
    for concurrency in options.concurrency:
        if not all((name, concurrency) in found for name in commands):
            continue
        row: dict[str, object] = {"concurrency": concurrency}
        cells = []
        for field in ("requests_per_second", "tokens_per_second", "ttft_ms", "tpot_ms"):
            pair = {
                name: statistics.median(each[field] for each in found[name, concurrency])
                for name in commands
            }
            row[field] = pair
            cells.append(f"{pair['k3jax']:9.2f} {pair['mlx_lm']:9.2f}")
        medians.append(row)
        print(f"{concurrency:8} " + " ".join(f"{cell:>20}" for cell in cells))
    settings = {"repeats": options.repeats, "tokens": options.tokens, "cpus": os.cpu_count()}
    record = {**settings, **progress.record(), "results": medians}
    print(json.dumps({"benchmark": "peers_mlx serve", **record}))
    return progress.status


def main() -> int:
    """1 if texts differ, or something was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("greedy", "serve"))
    parser.add_argument("--model", required=True, help="written by k3jax.convert --to hf")
    parser.add_argument("--peer", default=sys.executable, help="a Python with mlx_lm")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--prompt-characters", type=int, default=256)
    parser.add_argument("--port", type=int, default=8765, help="the peer gets the next one")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds until ready")
    parser.add_argument("server_arguments", nargs="*", help="after --, for k3jax.serve")
    add_limit(parser)
    options = parser.parse_intermixed_args()
    if not installed(options.peer):
        print(json.dumps({"benchmark": "peers_mlx", "skipped": f"{options.peer} has no mlx_lm"}))
        return 0
    if options.what == "greedy":
        return 0 if compare_greedy(options) else 1
    return compare_servers(options)


if __name__ == "__main__":
    sys.exit(main())
