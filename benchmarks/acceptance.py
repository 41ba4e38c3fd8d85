"""What n-gram drafts are worth on real text: `python -m benchmarks.acceptance FILE...`.

Each text is taken as what a model says after its first --prompt tokens, so the numbers do not
depend on a model's weights: a step brings its own token and the leading drafts that the text
confirms. The lookup is the server's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.progress import Progress
from k3jax.speculative import look_up
from k3jax.tokenizer import Tokenizer

BLOCK = 64  # places of the text whose drafts are looked up at a time
DEFAULT = ("README.md", "k3jax/scheduler.py", "tests/engine/test_scheduler.py", "deploy/README.md")


def drafts_everywhere(tokens: np.ndarray, count: int) -> np.ndarray:
    """Drafts i32[T, count] at each place of a text i32[T]: row n knows the tokens before n."""
    history = jnp.broadcast_to(jnp.asarray(tokens), (BLOCK, tokens.size))
    search = jax.jit(partial(look_up, count=count))
    places = np.arange(-(-tokens.size // BLOCK) * BLOCK, dtype=np.int32).reshape(-1, BLOCK)
    rows = [np.asarray(search(history, known)) for known in np.minimum(places, tokens.size)]
    return np.concatenate(rows)[: tokens.size]


def accepted_at(tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """How many leading drafts of each place the text confirms; int [T]."""
    ahead = np.arange(drafts.shape[1])
    following = np.append(tokens, np.full(ahead.size, -2))[np.arange(tokens.size)[:, None] + ahead]
    return np.cumprod(drafts == following, axis=1).sum(axis=1)


def steps(accepted: np.ndarray, start: int) -> list[int]:
    """The tokens of each step from place `start` on; the row before a place gives its token."""
    found, place = [], start
    while place + 1 < accepted.size:
        # The token at `place` is known; its row gives the next one, and drafts those after it.
        found.append(1 + int(accepted[place + 1]))
        place += found[-1]
    return found


def measure(tokens: np.ndarray, prompt: int, counts: list[int]) -> list[dict[str, float]]:
    """Tokens a step, and the rate of acceptance of each draft, for some numbers of drafts.

    ValueError for a text that ends before its first step.
    """
    if not 0 < prompt < tokens.size:
        raise ValueError(f"{tokens.size} tokens hold no step after a prompt of {prompt}")
    results = []
    most = accepted_at(tokens, drafts_everywhere(tokens, max(counts)))
    for count in counts:
        taken = np.array(steps(np.minimum(most, count), prompt - 1)) - 1
        rates = {f"draft_{n}": float((taken >= n).mean()) for n in range(1, count + 1)}
        results.append({"num_spec": count, "tokens_per_step": float(taken.mean()) + 1, **rates})
    return results


def main() -> int:
    """Print a table for each text, then one line of JSON; 1 if a text was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=DEFAULT)
    parser.add_argument("--tokenizer", default="checkpoints/k3-tiny", help="a checkpoint's")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are given")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at most")
    parser.add_argument("--num-spec", type=int, nargs="+", default=[1, 3, 7])
    options = parser.parse_args()
    tokenizer = Tokenizer.from_directory(options.tokenizer)
    results, progress = {}, Progress()
    for name in options.files:
        with progress.case(name):
            ids = tokenizer.encode(Path(name).read_text())[: options.tokens]
            results[name] = measure(np.array(ids, np.int32), options.prompt, options.num_spec)
            print(f"{name}: {len(ids)} tokens")
            for found in results[name]:
                rates = " ".join(f"{v:.2f}" for k, v in found.items() if k.startswith("draft"))
                worth = f"{found['tokens_per_step']:.2f} tokens a step"
                print(f"  {found['num_spec']} drafts: {worth}, each accepted {rates}", flush=True)
    record = {"prompt": options.prompt, **progress.record(), "results": results}
    print(json.dumps({"benchmark": "acceptance", **record}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
