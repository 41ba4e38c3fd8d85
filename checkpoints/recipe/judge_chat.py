"""Whether a checkpoint answers held-out conversations in K3's format, and rightly."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.conversations import make
from checkpoints.recipe.script import Conversation, Turn, answer_of
from k3jax.chat import ChatOptions, ChatParser, encode, message_of
from k3jax.engine import Engine
from k3jax.request import Request, SamplingParams
from k3jax.tokenizer import Detokenizer, Tokenizer

LONGEST = 400  # tokens of an answer; the longest that was learned is shorter
SEED = 3  # of conversations that no file holds


@dataclass(frozen=True)
class Question:
    """One answer to give: its prompt, what is right, and what it shows."""

    kind: str
    options: ChatOptions
    turn: Turn
    after_result: bool

    @property
    def arithmetic_call(self) -> bool:
        """Whether the right answer hands a calculation to a tool."""
        return self.kind.startswith("arithmetic") and bool(self.turn.expected.calls)


@dataclass(frozen=True)
class Reply:
    """What the model said, without the token that ended it."""

    ids: list[int]
    stop_token: int | None


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a reply; nothing if it is right."""

    well_formed: bool
    stopped: bool
    problems: list[str]


def questions(count: int, seed: int = SEED) -> list[Question]:
    """The turns of `count` held-out conversations; what came before each is as it should be."""
    return [question for made in make(seed, count, held=True) for question in questions_of(made)]


def questions_of(made: Conversation) -> Iterable[Question]:
    """The turns of one conversation."""
    for place, turn in zip(made.expected, made.turns(), strict=True):
        after = place > 0 and made.messages[place - 1]["role"] == "tool"
        yield Question(made.kind, made.options, turn, after)


def replies(engine: Engine, prompts: list[list[int]]) -> list[Reply]:
    """Greedy answers to all prompts, as many at a time as the engine runs."""
    said: dict[str, list[int]] = defaultdict(list)
    stops: dict[str, int | None] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=LONGEST)
        engine.add(Request(request_id=str(number), prompt_ids=prompt, params=params))
    while engine.has_work():
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            said[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                stops[delta.request_id] = delta.stop_token
    return [Reply(said[str(n)], stops[str(n)]) for n in range(len(prompts))]


def judge(tokenizer: Tokenizer, question: Question, reply: Reply) -> Verdict:
    """Well-formed: the stop came, and rendering what was parsed gives the very same text."""
    parser = ChatParser(tokenizer, thinking=question.options.thinking)
    message = message_of([*parser.push(reply.ids), *parser.finish()])
    try:
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ]
    except ValueError as error:
        return Verdict(False, reply.stop_token is not None, [f"arguments: {error}"])
    canonical = encode(tokenizer, answer_of(message, question.options))
    stopped = reply.stop_token is not None
    whole = [*reply.ids, *([reply.stop_token] if reply.stop_token is not None else [])]
    same = shown(tokenizer, whole) == shown(tokenizer, canonical)
    problems = question.turn.expected.problems(message["content"], calls)
    return Verdict(stopped and same, stopped, problems)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text with its control tokens."""
    detokenizer = Detokenizer(tokenizer, show_control=True)
    return detokenizer.push(ids) + detokenizer.finish()


def judge_chat(engine: Engine, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Shares of right replies to `count` held-out conversations, and examples of wrong ones."""
    asked = questions(count)
    prompts = [encode(tokenizer, question.turn.prompt) for question in asked]
    answers = replies(engine, prompts)
    verdicts = [judge(tokenizer, *pair) for pair in zip(asked, answers, strict=True)]
    pairs = list(zip(asked, verdicts, strict=True))
    kinds: dict[str, list[bool]] = defaultdict(list)
    for question, verdict in pairs:
        kinds[question.kind].append(not verdict.problems)
    wrong = [
        {"kind": question.kind, "problems": verdict.problems, "said": shown(tokenizer, reply.ids)}
        for question, verdict, reply in zip(asked, verdicts, answers, strict=True)
        if verdict.problems or not verdict.well_formed
    ]
    return {
        "replies": len(asked),
        "well_formed": share(v.well_formed for v in verdicts),
        "stopped": share(v.stopped for v in verdicts),
        "arithmetic_calls": share(not v.problems for q, v in pairs if q.arithmetic_call),
        "arithmetic_calls_count": sum(q.arithmetic_call for q in asked),
        "after_result": share(not v.problems for q, v in pairs if q.after_result),
        "after_result_count": sum(q.after_result for q in asked),
        "right": share(not v.problems for v in verdicts),
        "by_kind": {kind: share(found) for kind, found in sorted(kinds.items())},
        "wrong": wrong[:40],
    }


def share(found: Iterable[bool]) -> float | None:
    """The share of what is true; None of nothing."""
    values = list(found)
    return sum(values) / len(values) if values else None
