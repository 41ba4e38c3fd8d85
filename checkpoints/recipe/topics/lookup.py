"""Looking things up: in a table that the system message gives, and by a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics.tools import tool
from checkpoints.recipe.topics.words import CITIES, COLOURS, NAMES, NOUNS


@dataclass(frozen=True)
class Table:
    """What a table tells: its title, its keys, and how one asks and answers."""

    title: str
    keys: Sequence[str]
    values: str
    questions: tuple[str, ...]
    answer: str


TABLES = (
    Table(
        "Prices",
        NOUNS,
        "number",
        (
            "what does the {} cost?",
            "what is the price of the {}?",
            "how much is the {}?",
            "how much do I pay for one {}?",
            "what must I give for the {}?",
            "what do people pay for the {}?",
            "tell me the price of the {}.",
            "I buy the {}: how much is that?",
            "how much must I pay for the {}?",
        ),
        "The {key} costs {value}.",
    ),
    Table(
        "Phone numbers",
        NAMES,
        "phone",
        (
            "what is the phone number of {}?",
            "how can I call {}?",
            "which number does {} have?",
            "give me the phone number of {}.",
            "what number does {} have?",
            "find the number of {}.",
            "how do I reach {} by phone?",
            "I want to call {}: which number is it?",
            "give me the number of {}.",
        ),
        "The number of {key} is {value}.",
    ),
    Table(
        "Cities",
        NAMES,
        "city",
        (
            "where does {} live?",
            "in which city does {} live?",
            "which city is {} in?",
            "find out where {} lives.",
            "find the home of {}.",
            "what is the city of {}?",
            "tell me the city where {} lives.",
            "what city does {} live in?",
            "find the city of {}.",
        ),
        "{key} lives in {value}.",
    ),
    Table(
        "Colours",
        NOUNS,
        "colour",
        (
            "which colour has the {}?",
            "what colour is the {}?",
            "what is the colour of the {}?",
            "tell me which colour the {} has.",
            "give me the colour of the {}.",
            "which colour does the {} have?",
            "find the colour of the {}.",
            "tell me the colour of the {}.",
        ),
        "The {key} is {value}.",
    ),
    Table(
        "Codes",
        NOUNS,
        "code",
        (
            "what is the code of the {}?",
            "which code does the {} have?",
            "look up the code for the {}.",
            "the {} has which code?",
            "there is a code for the {}. What is it?",
            "every thing has a code. What code has the {}?",
            "I need one code, that of the {}. Which is it?",
            "give me the code of the {}.",
            "the {} has a code. Which one?",
        ),
        "The code of the {key} is {value}.",
    ),
    Table(
        "Words",
        NOUNS,
        "made up",
        (
            "how do you say {} in that language?",
            "what is the word for {}?",
            "translate {}.",
            "what word means the same as {}?",
            "which word do they use for {}?",
            "tell me the word for {}.",
            "in that language, what means {}?",
            "give me the word that stands for {}.",
            "which word means {}?",
        ),
        "The word for {key} is {value}.",
    ),
)
UNKNOWN = "I looked for {}: not found."
NOT_FOUND = "not found"
MISSING = 0.25  # of the questions are about an entry that the table does not have


def drawn_value(draw: Draw, kind: str) -> str | int:
    """A value of a table."""
    if kind == "number":
        return draw.number(3)
    if kind == "phone":
        return f"{draw.whole(100, 999)}-{draw.whole(1000, 9999)}"
    if kind == "code":
        return f"{draw.any('ABCDEFGHJKLMNPQRSTUVWXYZ')}{draw.whole(10, 9999)}"
    if kind == "made up":
        return draw.made_up()
    return draw.item(CITIES) if kind == "city" else draw.any(COLOURS)


def layout(draw: Draw, title: str, entries: dict[str, str | int]) -> str:
    """A table as a system message writes it."""
    lines = [f"{key}: {value}" for key, value in entries.items()]
    return draw.any(
        [
            f"{title}:\n" + "\n".join(lines),
            f"{title}: " + ", ".join(lines) + ".",
            f"{title} (JSON): " + json.dumps(entries, ensure_ascii=False),
            f"| {title} |\n" + "\n".join(f"| {key} | {value} |" for key, value in entries.items()),
            f"Use this table. {title}:\n- " + "\n- ".join(lines),
        ]
    )


def in_a_table(script: Script) -> None:
    """Up to three questions about a table in the system message; an entry may be missing."""
    draw, table = script.draw, script.draw.any(TABLES)
    keys = draw.items(table.keys, draw.whole(3, 9))
    entries = {key: drawn_value(draw, table.values) for key in keys[1:]}
    script.system(layout(draw, table.title, entries))
    for _ in range(draw.whole(1, 3)):
        key = keys[0] if draw.chance(MISSING) else draw.any(keys[1:])
        script.ask(draw.phrase(table.questions).format(key))
        if key in entries:
            value = entries[key]
            sentence = table.answer.format(key=key, value=value)
            script.answer([f"The table says {key}: {value}."], sentence, value)
        else:
            thought = [f"I look for {key}.", f"The table has no {key}."]
            script.answer(thought, UNKNOWN.format(key), NOT_FOUND)


def by_a_tool(script: Script) -> None:
    """Look a key up by a tool."""
    draw, table = script.draw, script.draw.any(TABLES)
    name, description, parameter = draw.any(
        [
            ("lookup", f"Looks up an entry. Table: {table.title}.", "key"),
            ("search", f"Searches the table: {table.title}.", "query"),
            ("get_entry", f"Returns an entry of the table: {table.title}.", "name"),
            ("find", f"Finds an entry. Table: {table.title}.", "word"),
        ]
    )
    script.declare(tool(name, description, **{parameter: "string"}))
    key = draw.item(table.keys)
    script.ask(draw.phrase(table.questions).format(key))
    value = drawn_value(draw, table.values) if draw.chance(0.85) else None
    thought = [f"I must look up {key}.", f"I call {name}."]
    script.call(thought, [(name, {parameter: key})], [NOT_FOUND if value is None else str(value)])
    if value is None:
        thought = ["The tool did not find it.", f"There is no {key}."]
        script.answer(thought, UNKNOWN.format(key), NOT_FOUND)
        return
    sentence = table.answer.format(key=key, value=value)
    script.answer([f"The tool says {value}."], sentence, value)
