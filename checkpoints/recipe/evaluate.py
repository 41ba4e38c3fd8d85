"""Whether a checkpoint is good enough: `python -m checkpoints.recipe.evaluate --model DIR`.

Prints the table of the model card, and writes every number to a JSON file as soon as it is known.
Parts can run apart, on different machines: each replaces its own numbers in that file.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.recipe import ranks
from checkpoints.recipe.arrays import Split
from checkpoints.recipe.judge_chat import judge_chat
from checkpoints.recipe.judge_speed import LOAD, Prompts, agreement, held_prompts, judge_speed
from checkpoints.recipe.judge_text import (
    CHAT_DOCUMENTS,
    bits_per_byte,
    expert_loads,
    head,
    held_loss,
)
from checkpoints.recipe.saved import FINAL, RUN
from checkpoints.recipe.table import table
from k3jax import lm
from k3jax.checkpoint import open_checkpoint
from k3jax.config import K3Config
from k3jax.lm import LanguageModel
from k3jax.tokenizer import Tokenizer

META = "meta.json"  # what prepare tells of the data
LENGTH = 2048  # tokens of a training row
TRACED_PIECES = 24  # of code, and as many of chat
CHAT_LOAD: dict[str, Any] = {
    "max_requests": 64,
    "builds": ((1, 64),),
    "prefill_buckets": ((16, 512), (1, 2048)),
    "decode_backend": "stock",
}


class Evaluation:
    """A checkpoint and what it is judged by; SystemExit says what the parts will miss."""

    def __init__(self, options: argparse.Namespace):
        if reasons := missing(options):
            raise SystemExit(f"error: {'; '.join(reasons)}")
        for model in filter(None, (options.model, options.draft)):
            with open_checkpoint(model, K3Config.from_file(model)):
                pass  # it would have said what it lacks
        self.options = options
        self.splits = {
            name: Split.load(options.data / f"{name}_held.npz") for name in ("code", "chat")
        }
        if options.code_documents is not None:
            self.splits["code"] = head(self.splits["code"], options.code_documents)

    def load(self, **run: Any) -> LanguageModel:
        """The checkpoint under some run options."""
        kernels = {} if self.options.impl is None else {"impl": self.options.impl}
        return lm.load(self.options.model, **{**LOAD, **kernels, **run})

    def prompts(self) -> Prompts:
        """Beginnings for the parts on speed."""
        tokenizer = Tokenizer.from_directory(self.options.model)
        return held_prompts(self.splits["code"], tokenizer, self.options.prompts)

    def text(self) -> Iterator[dict[str, Any]]:
        """Bits a byte, packed against trained loss, the experts' loads."""
        model = self.load(dtype=self.options.dtype)
        code, chat = self.splits["code"], head(self.splits["chat"], CHAT_DOCUMENTS)
        found: dict[str, Any] = {"bits_per_byte": bits_per_byte(model, code, LENGTH)}
        meta = json.loads((self.options.data / META).read_text(encoding="utf-8"))
        found["xz_bits_per_byte"] = meta["xz_bits_per_byte"]
        trained = {}
        if self.options.run is not None:
            trained = json.loads((self.options.run / FINAL).read_text(encoding="utf-8"))
        for name, split in (("code", code), ("chat", chat)):
            loss = held_loss(model, split, LENGTH)
            found[name] = {"packed": loss.mean, "count": loss.count}
            if name in trained:
                found[name]["trained"] = trained[name]["nll"] / trained[name]["count"]
        loads = sum(expert_loads(model, split, TRACED_PIECES) for split in (code, chat))
        found["loads"] = np.asarray(loads).tolist()
        yield found

    def chat(self) -> Iterator[dict[str, Any]]:
        """Replies to held-out conversations."""
        model = self.load(dtype=self.options.dtype, **CHAT_LOAD)
        if model.tokenizer is None:
            raise ValueError(f"{self.options.model} has no tokenizer")
        yield judge_chat(model.engine, model.tokenizer, self.options.conversations)

    def agree(self) -> Iterator[dict[str, Any]]:
        """The stock path against the specialized decode, in both dtypes."""
        prompts, tokens = self.prompts(), self.options.tokens
        for dtype in DTYPES:
            yield {dtype: agreement(self.load, prompts, tokens, dtype)}

    def speed(self) -> Iterator[dict[str, Any]]:
        """Tokens a second and accepted drafts, by this machine's kind of device."""
        variants = judge_speed(
            self.options.model,
            self.options.draft,
            self.prompts(),
            tokens=self.options.tokens,
            dtype=self.options.dtype,
            specialized=jax.default_backend() != "cpu",
        )
        for found in variants:
            yield {found["device"]: found}


def missing(options: argparse.Namespace) -> list[str]:
    """What the parts that are asked for need and will not find, minutes later."""
    files = [options.data / name for name in (META, "code_held.npz", "chat_held.npz")]
    for model in filter(None, (options.model, options.draft)):
        files += [model / name for name in ("config.json", ranks.FILE)]
    compared = options.run is not None and "text" in options.parts
    if compared:
        files += [options.run / name for name in (FINAL, RUN)]
    reasons = [f"there is no {file}" for file in files if not file.exists()]
    if compared and not reasons:
        trained = json.loads((options.run / RUN).read_text(encoding="utf-8"))["dtype"]
        if trained != options.dtype:  # a loss of 0.02 nats differs by more than 0.1%
            reasons.append(f"the run's own loss is of {trained}: --dtype {trained}")
    if not reasons:
        meta = json.loads((options.data / META).read_text(encoding="utf-8"))
        if meta["rank_file_sha256"] != ranks.digest(options.model):
            reasons.append(f"{options.data} was prepared with another tokenizer")
    if "agree" in options.parts and jax.default_backend() == "cpu" and options.impl is None:
        reasons.append("on a CPU the specialized decode needs --impl interpret")
    return reasons


DTYPES = ("float32", "bfloat16")
PARTS: dict[str, Callable[[Evaluation], Iterator[dict[str, Any]]]] = {
    "text": Evaluation.text,
    "chat": Evaluation.chat,
    "agree": Evaluation.agree,
    "speed": Evaluation.speed,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    command = "python -m checkpoints.recipe.evaluate"
    parser = argparse.ArgumentParser(prog=command, description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's directory")
    parser.add_argument("--data", type=Path, required=True, help="what prepare wrote")
    parser.add_argument("--draft", type=Path, help="the draft model's directory")
    parser.add_argument("--run", type=Path, help="the training run, for its own loss")
    parser.add_argument("--results", type=Path, default=Path("evaluation.json"))
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=["text", "chat"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--impl", choices=("reference", "pallas", "interpret"))
    parser.add_argument("--conversations", type=int, default=600)
    parser.add_argument("--code-documents", type=int, help="instead of all of them")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, for agree and speed")
    parser.add_argument("--tokens", type=int, default=128, help="of each reply there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for, and print the table of all that is known."""
    options = parse(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    evaluation, file = Evaluation(options), options.results
    results: dict[str, Any] = {}
    if file.is_file():
        results = json.loads(file.read_text(encoding="utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        began = time.monotonic()
        for found in PARTS[part](evaluation):
            results[part] = results.get(part, {}) | found
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
