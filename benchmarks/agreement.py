"""Where bfloat16 parts specialized decode from the stock path: `python -m benchmarks.agreement`.

Both answer the same prompts greedily, pieces of README.md. At the first token in which they differ
both go on from the stock path's, so that every token has the same ones before it. Of each
difference it prints how close the choice was, by the stock path: the distance of the two likeliest
tokens' logits, and of the last expert that a router took to the first that it left, the least of
all layers at that row, in units of bfloat16's last place there. Then the rate; the last line is
JSON. In float32 there must be none: the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.config import K3Config
from k3jax.lm import LanguageModel, load

TEXT = Path(__file__).parent.parent / "README.md"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token of which the paths think differently; distances in units of the last place."""

    prompt: int
    place: int  # of the token in the answer
    stock: int
    specialized: int
    logits: float
    router: float | None  # None without routers


def answers(
    stock: LanguageModel, other: LanguageModel, prompt: Sequence[int], tokens: int
) -> Iterator[tuple[int, list[int], int, int]]:
    """(place, what stands before it, stock's token, the other's) of each difference."""
    said: list[int] = []
    while len(said) < tokens:
        ids = [*prompt, *said]
        wishes = {"max_tokens": tokens - len(said), "temperature": 0.0, "ignore_eos": True}
        one, two = stock.generate(ids, **wishes), other.generate(ids, **wishes)
        same = next((at for at, token in enumerate(one) if token != two[at]), None)
        if same is None:
            return
        yield len(said) + same, [*ids, *one[:same]], one[same], two[same]
        said += one[: same + 1]


def places(distance: float, value: float) -> float:
    """A distance in units of the last place that bfloat16 has at a value."""
    return float(distance / 2.0 ** (np.floor(np.log2(np.abs(value))) - 7))


def logits_distance(logits: np.ndarray) -> float:
    """Of the two likeliest tokens, float32 [V]."""
    second, first = np.sort(logits)[-2:]
    return places(first - second, first)


def router_distance(trace: dict[str, np.ndarray], params: Any, config: K3Config) -> float | None:
    """The least of all layers, at the last row of a trace."""
    found = []
    for index, layer in params["layers"].items():
        if "router" in layer["ffn"]:
            row = trace[f"layers.{index}.ffn_in"][-1].astype(np.float32)
            products = row @ np.asarray(layer["ffn"]["router"], np.float32).T
            scores = 1 / (1 + np.exp(-products)) + np.asarray(layer["ffn"]["bias"], np.float32)
            left, taken = np.sort(scores)[-config.moe.top_k - 1 :][:2]
            found.append(places(taken - left, taken))
    return min(found, default=None)


def differences(
    stock: LanguageModel, other: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int
) -> Iterator[Difference]:
    """All of them, each as soon as it is found."""
    for number, prompt in enumerate(prompts):
        for place, before, one, two in answers(stock, other, prompt, tokens):
            trace = stock.trace(before)
            near = router_distance(trace, stock.params, stock.config)
            logits = logits_distance(trace["logits"][-1])
            yield Difference(number, place, one, two, logits, near)


def main() -> int:
    """Compare, print each difference and the rate, then a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--model", default="checkpoints/k3-nano")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--num-spec", type=int, default=0, help="drafts a step, by n-gram lookup")
    parser.add_argument("--impl", help="of the kernels; interpret runs anywhere")
    options = parser.parse_args()
    drafts = {"num_spec": options.num_spec, "drafter": "ngram"} if options.num_spec else {}
    context = options.prompt_tokens + options.tokens
    stock = load(
        options.model, dtype=options.dtype, decode_backend="stock", max_context=context, **drafts
    )
    run = dataclasses.replace(stock.decode_config, decode_backend="specialized", impl=options.impl)
    other = LanguageModel(stock.params, stock.config, run, stock.mesh)
    if stock.tokenizer is None:
        parser.error(f"{options.model} has no tokenizer to read {TEXT.name} with")
    ids = stock.tokenizer.encode(TEXT.read_text())
    length = options.prompt_tokens
    prompts = [ids[i * length : (i + 1) * length] for i in range(options.prompts)]
    found = []
    for each in differences(stock, other, prompts, options.tokens):
        found.append(each)
        router = "" if each.router is None else f", an expert by {each.router:.1f}"
        print(
            f"prompt {each.prompt} token {each.place}: {each.stock} and {each.specialized}, "
            f"likeliest by {each.logits:.1f}{router}",
            flush=True,
        )
    total = options.prompts * options.tokens
    print(f"{jax.devices()[0].device_kind}: {len(found)} of {total} tokens differ")
    record = {**vars(options), "tokens_compared": total, "jax": jax.__version__}
    listed = [dataclasses.asdict(each) for each in found]
    print(json.dumps({"benchmark": "agreement", **record, "differences": listed}))
    return int(options.dtype == "float32" and bool(found))


if __name__ == "__main__":
    sys.exit(main())
