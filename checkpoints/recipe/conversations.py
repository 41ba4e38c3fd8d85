"""Conversations for k3-nano, each with what is right: made by a seed, split by content.

Numbers, dates, words, names and the last phrase of each list are of one side only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.forms import KEYS, PLAIN, Form, drawn_form
from checkpoints.recipe.script import Conversation, Script
from checkpoints.recipe.topics import arithmetic, dates, lookup, services, strings, talk
from k3jax.chat import ChatOptions

EFFORTS = {"max": 50, "high": 10, "medium": 10, "low": 15, None: 15}
"""How often each thinking effort is asked for; a server's default is max."""
WITHOUT_THINKING = 0.15
WITH_FORM = 0.3  # of the conversations whose topic knows several forms
FORGETFUL = 0.35  # of the clients do not send reasoning back
MUST_CALL = 0.08  # of the conversations with calls are asked with tool_choice "required"


@dataclass(frozen=True)
class Topic:
    """What a conversation is about: its weight in the mix, and the forms that it knows.

    `joins`: other topics may follow in the same conversation, whatever tools they bring.
    """

    write: Callable[[Script], None]
    weight: int
    forms: str = "any"  # or "no capitals" (of unknown words), "capitals", "plain"
    joins: bool = True


def mixed(script: Script) -> None:
    """Two or three topics, one after the other, in plain sentences."""
    joining = {name: topic.weight for name, topic in TOPICS.items() if topic.joins}
    for _ in range(script.draw.whole(2, 3)):
        TOPICS[script.draw.weighted(joining)].write(script)


TOPICS = {
    "arithmetic": Topic(arithmetic.one_sum, 22),
    "arithmetic, parallel": Topic(arithmetic.two_sums, 6, "plain"),
    "arithmetic, long": Topic(arithmetic.long_sum, 4),
    "arithmetic, steps": Topic(arithmetic.in_steps, 5, joins=False),
    "arithmetic, operation": Topic(arithmetic.one_operation, 5, joins=False),
    "arithmetic, by heart": Topic(arithmetic.by_heart, 8, joins=False),
    "arithmetic, refused": Topic(arithmetic.no_calculator, 3, "capitals", joins=False),
    "weekday": Topic(dates.day_of_week, 4),
    "days on": Topic(dates.days_on, 4),
    "days apart": Topic(dates.days_apart, 4),
    "weekday, refused": Topic(dates.no_calendar, 2, "capitals", joins=False),
    "text": Topic(strings.work_on_text, 6, "no capitals"),
    "letters": Topic(strings.count_letter, 3),
    "copy": Topic(strings.copy, 4, "no capitals"),
    "repeat": Topic(strings.repeat, 3, "plain"),
    "table": Topic(lookup.in_a_table, 10, "no capitals", joins=False),
    "lookup": Topic(lookup.by_a_tool, 7, "no capitals", joins=False),
    "service": Topic(services.ask_a_service, 12, "plain"),
    "service, parallel": Topic(services.ask_for_two, 5, "plain"),
    "service, refused": Topic(services.no_service, 3, "capitals", joins=False),
    "itself": Topic(talk.about_itself, 5, "capitals"),
    "manners": Topic(talk.manners, 3, "capitals"),
    "python": Topic(talk.python, 6, "plain"),
    "code": Topic(talk.snippet, 4, "plain"),
    "own tools": Topic(talk.own_tools, 3, "plain", joins=False),
    "unknown": Topic(talk.unknown, 4, "capitals"),
    "memory": Topic(talk.memory, 6, "plain"),
    "not to call": Topic(talk.told_not_to_call, 3, "capitals", joins=False),
    "mixed": Topic(mixed, 14, "plain", joins=False),
}
NEEDS_NO_TOOL = frozenset({"itself", "manners", "python", "code", "copy", "repeat", "memory"})
IDLE_TOOLS = 0.25  # of their conversations have tools all the same
WEIGHTS = {name: topic.weight for name, topic in TOPICS.items()}


SYSTEM = [
    "You are a helpful assistant.",
    "You are k3-nano, a small and friendly model.",
    "You are an assistant. Use tools where you can.",
    "Be brief.",
    "Be kind and short.",
    "You help people with their tasks.",
    "Help the user.",
    "You do small things for the user.",
    "You help the user with small tasks.",
]


def make(seed: int, count: int, *, held: bool) -> Iterator[Conversation]:
    """Conversations of one side, the same for the same seed."""
    for number in range(count):
        yield conversation(Draw(f"{seed} {number} {held}", held=held))


def conversation(draw: Draw, kind: str | None = None) -> Conversation:
    """One conversation, of a drawn kind if none is given."""
    kind = kind or draw.weighted(WEIGHTS)
    topic = TOPICS[kind]
    thinking = not draw.chance(WITHOUT_THINKING)
    effort = draw.weighted(EFFORTS)
    options = ChatOptions(thinking=thinking, thinking_effort=effort if thinking else None)
    form = _form(draw, topic.forms) if draw.chance(WITH_FORM) else PLAIN
    script = Script(draw, options, form)
    by_format = form.name == "json" and draw.chance(0.5)
    if by_format:
        script.form = form = Form("json", draw.any([KEYS[0], form.key]))
    elif form is not PLAIN:
        script.system(form.instruction(draw))
    elif draw.chance(0.1):
        script.system(draw.phrase(SYSTEM))
    if kind in NEEDS_NO_TOOL and draw.chance(IDLE_TOOLS):
        services.declare(script, draw.some(services.SERVICES, draw.whole(1, 2)))
    topic.write(script)
    made = Conversation(kind, script.messages, script.tools, options, script.expected)
    return _with_format(made, draw, form) if by_format else _requested(made, draw)


def _form(draw: Draw, forms: str) -> Form:
    """A form that a topic knows, or plain."""
    form = Form("capitals") if forms == "capitals" else drawn_form(draw)
    if forms == "plain" or (forms == "no capitals" and form.name == "capitals"):
        return PLAIN
    return form


def _with_format(made: Conversation, draw: Draw, form: Form) -> Conversation:
    """Ask for JSON not by an instruction but by the request's format."""
    value = json.loads(made.messages[-1]["content"])[form.key]
    cut = _only_turn(made, draw.any(list(made.expected)))
    response_format = form.response_format(draw, value)
    return replace(cut, options=replace(cut.options, response_format=response_format))


def _requested(made: Conversation, draw: Draw) -> Conversation:
    """Choose what the request says beside the messages, and which turns are learned."""
    if made.kind == "not to call":
        return replace(made, options=replace(made.options, tool_choice="none"))
    calling = [place for place, expected in made.expected.items() if expected.calls]
    if calling and draw.chance(MUST_CALL):
        made = _only_turn(made, draw.any(calling))
        return replace(made, options=replace(made.options, tool_choice="required"))
    if made.options.thinking and draw.chance(FORGETFUL):
        return _only_turn(made, draw.any(list(made.expected)))
    return made


def _only_turn(made: Conversation, place: int) -> Conversation:
    """The conversation up to one answer, the others without the reasoning that led to them."""
    before = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in made.messages[:place]
    ]
    expected = {place: made.expected[place]}
    return replace(made, messages=[*before, made.messages[place]], expected=expected)
