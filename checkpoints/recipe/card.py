"""The model card: `python -m checkpoints.recipe.card --model DIR --results FILE --run DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from checkpoints.recipe.model import BUDGETS, SHAPES, Shape
from checkpoints.recipe.saved import RUN
from checkpoints.recipe.table import table
from k3jax.config import K3Config
from k3jax.sizes import active_parameters, bytes_at_rest, total_parameters

CARD = """# {name}

A small Kimi-K3 model that was trained in this repository, so that everything K3 has can be seen
working on any computer: KDA, gated latent attention, attention residuals, a latent mixture of
experts in MXFP4, SiTU, K3's chat format with thinking and tool calls. It knows the Python standard
library's style and some small tasks; it knows next to nothing of the world.

- Size: {total} parameters, {active} of them active for a token; {weights} bytes of weights.
- Layers: {layers}; hidden width {hidden}; {experts} experts, {top_k} chosen, in a latent of
  {latent}; attention residuals in blocks of {block} layers; vocabulary {vocabulary}.
- Trained quantization-aware: the MXFP4 weights are the model.
- Training: {steps} steps of {code_rows} rows of code and {chat_rows} of conversations, of {length}
  tokens each, seed {seed}. Data, licences and the exact commands: `checkpoints/recipe/README.md`.
- License: Apache-2.0, like the rest of this repository. The Python standard library, whose sources
  it learned from, is under the PSF License Version 2.

## What it reaches

Everything is measured on modules and conversations that no training text comes from.

{table}

Where both paths part in bfloat16, the two best tokens are as close as the gap says. Drafts: code is
sampled at temperature 1 after 512 tokens of a held-out file, chat is greedy.
"""


def card(name: str, shape: Shape, config: K3Config, run: dict[str, Any], rows: str) -> str:
    """The card's text; `rows` is the table of results."""
    kda, mla = config.mixers.count("kda"), config.mixers.count("mla")
    return CARD.format(
        name=name,
        total=f"{total_parameters(config):,}",
        active=f"{active_parameters(config):,}",
        weights=f"{bytes_at_rest(config):,}",
        layers=f"{len(config.mixers)} ({shape.layers}): {kda} KDA and {mla} latent attention",
        hidden=config.hidden_size,
        experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        latent=config.moe.latent,
        block=config.attn_res_block,
        vocabulary=config.vocab_size,
        steps=f"{run['steps']:,}",
        code_rows=run["code_rows"],
        chat_rows=run["chat_rows"],
        length=run["length"],
        seed=run["seed"],
        table=rows,
    )


def main(arguments: list[str] | None = None) -> int:
    """Write DIR/README.md; 1 if the directory has outgrown its budget."""
    command = "python -m checkpoints.recipe.card"
    parser = argparse.ArgumentParser(prog=command, description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's directory")
    parser.add_argument("--results", type=Path, required=True, help="what evaluate wrote")
    parser.add_argument("--run", type=Path, required=True, help="the run's run.json, or its folder")
    options = parser.parse_args(arguments)
    file = options.run / RUN if options.run.is_dir() else options.run
    run = json.loads(file.read_text(encoding="utf-8"))
    name, config = run["model"], K3Config.from_file(options.model)
    rows = table(json.loads(options.results.read_text(encoding="utf-8")))
    text = card(name, SHAPES[name], config, run, rows)
    (options.model / "README.md").write_text(text, encoding="utf-8")
    files = [file for file in options.model.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"{options.model}: {size:,} bytes of {BUDGETS[name]:,}")
    return int(size > BUDGETS[name])


if __name__ == "__main__":
    raise SystemExit(main())
