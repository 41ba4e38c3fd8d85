"""Greedy texts of mlx_lm in float32: run by `benchmarks.peers_mlx greedy`, by the peer's Python.

Reads {"model", "prompts", "tokens"} from stdin and writes, for each prompt, its ids by the
exported tokenizer.json and the ids that follow. Needs mlx_lm and nothing of this project.
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step


def main() -> None:
    """One line of JSON: [[prompt ids, new ids], ...]."""
    asked = json.load(sys.stdin)
    model, tokenizer = mlx_lm.load(asked["model"])
    model.set_dtype(mx.float32)  # packed experts stay as they are
    answers = []
    for prompt in asked["prompts"]:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        steps = generate_step(mx.array(ids), model, max_tokens=asked["tokens"])
        answers.append([ids, [int(token) for token, _ in steps]])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
