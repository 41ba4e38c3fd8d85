"""How fast a checkpoint answers, what drafts are worth, and whether both paths say the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.recipe.arrays import Split
from checkpoints.recipe.judge_chat import questions
from k3jax import lm
from k3jax.chat import encode
from k3jax.explore.drafts import acceptance
from k3jax.lm import LanguageModel
from k3jax.request import SamplingParams
from k3jax.tokenizer import Tokenizer

CODE_PROMPT = 512  # tokens
NUM_SPEC = 4
LOAD: dict[str, Any] = {"max_context": 2048, "cache_memory": 1 << 30}
"""Options of `k3jax.load`, of every model: several must fit the memory beside each other."""
CODE = SamplingParams(temperature=1.0, seed=0)  # greedy code soon repeats itself
CHAT = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Prompts:
    """Held-out beginnings to go on from."""

    code: list[list[int]]
    chat: list[list[int]]


def held_prompts(split: Split, tokenizer: Tokenizer, count: int) -> Prompts:
    """`count` of each: the starts of code files, and turns of conversations."""
    long = split.starts[split.ends - split.starts > 1024]
    code = [split.tokens[start : start + CODE_PROMPT].tolist() for start in long[:count]]
    chat = [encode(tokenizer, question.turn.prompt) for question in questions(count)[:count]]
    return Prompts(code, chat)


def measure(model: LanguageModel, prompts: Prompts, tokens: int) -> dict[str, Any]:
    """Tokens a second of one request at a time, and how often drafts are accepted, by place."""
    result: dict[str, Any] = {}
    for kind, sampling in (("code", CODE), ("chat", CHAT)):
        counts: list[int] = []
        seconds, said = 0.0, 0
        for prompt in getattr(prompts, kind):
            taken, found = one_reply(model, prompt, sampling, tokens)
            seconds, said = seconds + taken, said + sum(found)
            counts += found[:-1]  # the last step may end anywhere inside its drafts
        drafts = model.decode_config.num_spec
        result[kind] = {
            "tokens_per_second": said / seconds if seconds else None,
            "tokens_per_step": float(np.mean(counts)) if counts else None,
            "accepted": (acceptance(counts, drafts) / 100).tolist() if counts else [],
        }
    result["steps"] = model.engine.stats().steps
    return result


def one_reply(
    model: LanguageModel, prompt: list[int], sampling: SamplingParams, tokens: int
) -> tuple[float, list[int]]:
    """(Seconds after the first token, tokens of each decode step) of one answer."""
    counts: list[int] = []
    began = 0.0
    params = SamplingParams(temperature=sampling.temperature, seed=sampling.seed, max_tokens=tokens)
    for delta in model.engine.stream(prompt, params):
        if delta.error:
            raise RuntimeError(delta.error)
        if not began:
            began = time.perf_counter()
        else:
            counts.append(len(delta.token_ids) + (delta.stop_token is not None))
    return time.perf_counter() - began, [count for count in counts if count]


def agreement(
    load: Callable[..., LanguageModel], prompts: Prompts, tokens: int, dtype: str
) -> dict[str, Any]:
    """Greedy text of both paths, token for token; where they part, the stock path's top-2 gap."""
    stock, special = (
        load(dtype=dtype, decode_backend=backend) for backend in ("stock", "specialized")
    )
    same = compared = 0
    partings = []
    for prompt in [*prompts.code, *prompts.chat]:
        texts = [model.generate(prompt, max_tokens=tokens) for model in (stock, special)]
        length = min(map(len, texts))
        at = next((n for n in range(length) if texts[0][n] != texts[1][n]), length)
        compared += at + (at < length)
        same += at
        if at < length or len(texts[0]) != len(texts[1]):
            best = np.sort(stock.logits([*prompt, *texts[0][:at]])[-1])[-2:]
            partings.append({"token": at, "gap": float(best[1] - best[0])})
    steps = special.engine.stats().steps
    return {"compared": compared, "same": same, "partings": partings, "steps": steps}


def variants(draft: Path | None, specialized: bool) -> dict[str, dict[str, Any]]:
    """What is timed: options of `k3jax.load` by name."""
    drafted = {**LOAD, "num_spec": NUM_SPEC}
    backends = ("stock", "specialized") if specialized else ("stock",)
    found = {}
    for backend in backends:
        found[backend] = {**LOAD, "decode_backend": backend}
        found[f"{backend}, n-gram"] = {**drafted, "drafter": "ngram", "decode_backend": backend}
        if draft is not None:
            found[f"{backend}, draft model"] = {
                **drafted,
                "drafter": str(draft),
                "decode_backend": backend,
            }
    return found


def judge_speed(
    path: Path, draft: Path | None, prompts: Prompts, *, tokens: int, dtype: str, specialized: bool
) -> Iterator[dict[str, Any]]:
    """The variants' numbers on the platform that this runs on, each time one is known."""
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "dtype": dtype}
    for name, options in variants(draft, specialized).items():
        model = lm.load(path, dtype=dtype, **options)
        for prompt in (prompts.code[0], prompts.chat[0]):
            one_reply(model, prompt, CHAT, 8)
        found[name] = measure(model, prompts, tokens)
        yield found
