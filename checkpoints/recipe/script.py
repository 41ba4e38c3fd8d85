"""A conversation in the making, and made: messages, tools, and what is right at each turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.forms import Form
from k3jax.chat import ChatOptions, Segment, render

T = TypeVar("T")
Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
THOUGHTS = {"low": 1, "medium": 2}  # sentences of thinking at an effort; all of them at others


@dataclass(frozen=True)
class Expected:
    """What an assistant's message must be to be right.

    `calls` in their order; the content `equals` a text (None: any), has each of `contains` as
    whole words, and its last number is `number` (None: any).
    """

    calls: tuple[Call, ...] = ()
    equals: str | None = None
    contains: tuple[str, ...] = ()
    number: str | None = None
    capitals: bool = False

    def problems(self, content: str, calls: Sequence[Call]) -> list[str]:
        """What is wrong with an answer; nothing if it is right."""
        found = []
        if list(calls) != list(self.calls):
            found.append(f"calls {list(calls)}, not {list(self.calls)}")
        if self.equals is not None and content != self.equals:
            found.append(f"says {content!r}, not {self.equals!r}")
        numbers = NUMBER.findall(content)
        if self.number is not None and numbers[-1:] != [self.number]:
            found.append(f"the last number of {content!r} is not {self.number}")
        missing = [part for part in self.contains if not _has(content, part)]
        found += [f"{part!r} is not in {content!r}" for part in missing]
        if self.capitals and content != content.upper():
            found.append(f"{content!r} is not in capitals")
        return found


@dataclass(frozen=True)
class Turn:
    """One answer: the prompt before it, the answer itself and what makes it right."""

    prompt: list[Segment]
    answer: list[Segment]
    expected: Expected


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as OpenAI's API has them; `expected` by the place of a message.

    The options of the last turn are `options`; those before it were asked for without a choice
    of tools or a format.
    """

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    options: ChatOptions
    expected: dict[int, Expected]

    def turns(self) -> Iterator[Turn]:
        """The answers to learn, and to be judged by."""
        last = len(self.messages) - 1
        for place, expected in self.expected.items():
            options = self.options if place == last else plain(self.options)
            prompt = render(self.messages[:place], self.tools, options)
            yield Turn(prompt, answer_of(self.messages[place], options), expected)

    def segments(self) -> tuple[list[Segment], list[bool]]:
        """The whole conversation, and for each segment whether the assistant must learn it."""
        every = list(self.turns())
        head = len(render([], None, plain(self.options)))
        whole = [*every[-1].prompt, *every[-1].answer]
        learned = [False] * len(whole)
        for turn in every:
            start = len(turn.prompt)
            if turn.prompt[:-head] != whole[: start - head]:
                raise ValueError("a turn's prompt does not begin as the conversation's last does")
            learned[start : start + len(turn.answer)] = [True] * len(turn.answer)
        return whole, learned


def _has(content: str, part: str) -> bool:
    """Whether a text has a part, and not inside a longer word or number."""
    before = r"(?<![\w.-])" if part[:1].isalnum() else ""
    after = r"(?!\w|[.]\d)" if part[-1:].isalnum() else ""
    return re.search(before + re.escape(part) + after, content) is not None


def plain(options: ChatOptions) -> ChatOptions:
    """Options without what is said right before the answer."""
    return replace(options, tool_choice=None, response_format=None)


def answer_of(message: Message, options: ChatOptions) -> list[Segment]:
    """What the assistant must produce after the prompt's opening tags, end of message included."""
    opening = render([], None, ChatOptions(thinking=options.thinking))
    return render([message], None, ChatOptions(thinking=options.thinking))[
        len(opening) : -len(opening)
    ]


@dataclass
class Script:
    """Writes a conversation; topics call it in the order in which things are said."""

    draw: Draw
    options: ChatOptions
    form: Form
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[int, Expected] = field(default_factory=dict)
    _chosen: dict[str, Any] = field(default_factory=dict)

    def once(self, what: str, choose: Callable[[], T]) -> T:
        """A choice that holds for the whole conversation."""
        if what not in self._chosen:
            self._chosen[what] = choose()
        return self._chosen[what]

    def declare(self, *tools: Mapping[str, Any]) -> None:
        """Give the assistant tools, each once."""
        names = {tool["function"]["name"] for tool in self.tools}
        self.tools += [dict(tool) for tool in tools if tool["function"]["name"] not in names]

    def system(self, text: str) -> None:
        """Instruct the assistant, in one message with an instruction right before."""
        if self.messages and self.messages[-1]["role"] == "system":
            text = f"{self.messages.pop()['content']}\n{text}"
        self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        """Say exactly this."""
        self.messages.append({"role": "user", "content": text})

    def ask(self, question: str) -> None:
        """Ask in one of many manners."""
        self.user(worded(self.draw, question))

    def call(self, thought: Sequence[str], calls: Sequence[Call], results: Sequence[str]) -> None:
        """The assistant calls tools and gets their results."""
        first = sum(len(message.get("tool_calls", ())) for message in self.messages) + 1
        ids = [f"call_{first + place}" for place in range(len(calls))]
        said = [
            {
                "id": identifier,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
            }
            for identifier, (name, given) in zip(ids, calls, strict=True)
        ]
        self._assistant(thought, "", Expected(calls=tuple(calls), equals=""), said)
        self.messages += [
            {"role": "tool", "tool_call_id": identifier, "content": result}
            for identifier, result in zip(ids, results, strict=True)
        ]

    def say(self, thought: Sequence[str], text: str, *parts: str) -> None:
        """The assistant answers freely; `parts` must be in a right answer."""
        self._assistant(thought, text, Expected(contains=parts or (text,)))

    def answer(self, thought: Sequence[str], sentence: str, value: str | int | float) -> None:
        """The assistant answers with a value, in the form that the conversation asks for."""
        text = self.form.write(sentence, value)
        capitals = self.form.name == "capitals"
        if self.form.exact:
            expected = Expected(equals=text)
        elif isinstance(value, str):
            expected = Expected(contains=(self.form.aloud(value),), capitals=capitals)
        else:
            expected = Expected(number=str(value), capitals=capitals)
        self._assistant([*thought, *self.form.thoughts], text, expected)

    def _assistant(
        self,
        thought: Sequence[str],
        text: str,
        expected: Expected,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        message: Message = {"role": "assistant", "content": text}
        if self.options.thinking:
            count = THOUGHTS.get(self.options.thinking_effort or "", len(thought))
            message["reasoning_content"] = " ".join(thought[-count:])
        if calls:
            message["tool_calls"] = list(calls)
        self.expected[len(self.messages)] = expected
        self.messages.append(message)


BEFORE = [
    *("", "", "", "", "Please tell me: ", "Hi! ", "Hello, ", "Quick question: ", "Hey, "),
    *("Can you help me? ", "I need to know: ", "Tell me, ", "Dear assistant, ", "A question: "),
    *("I wonder: ", "Next: ", "Good day! ", "For my homework: ", "Listen to this: "),
    *("Now listen, ", "Listen: "),
]
AFTER = [
    *("", "", "", "", "", "", " Thanks!", " Please.", " Thank you.", " I am curious."),
    *(" Thanks and cheers.", " Cheers, my friend.", " Cheers!"),
]


def worded(draw: Draw, question: str) -> str:
    """A question, which begins with a small letter unless it must not, in one of many manners."""
    before, after = draw.phrase(BEFORE), draw.phrase(AFTER)
    if not before.endswith((": ", ", ")) and draw.chance(0.9):
        question = question[0].upper() + question[1:]
    if not after and draw.chance(0.15):
        question = question.rstrip("?.")
    return before + question + after
