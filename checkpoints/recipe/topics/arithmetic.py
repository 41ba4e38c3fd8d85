"""Sums: through a calculator, through tools of one operation, in steps, and in the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics.operations import OPERATIONS, Number, Operation
from checkpoints.recipe.topics.tools import result, tool
from checkpoints.recipe.topics.words import NAMES

EASY = 12  # sums of numbers up to this are known by heart
THINGS = ["apples", "pears", "books", "coins", "stamps", "tickets", "stones", "cups", "shoes"]
CALCULATORS = ("calculator", "calculate", "calc", "evaluate", "compute", "arithmetic")
PARAMETERS = ("expression", "formula", "input", "sum")
ROUNDING = "Works out an arithmetic expression, to four places."
SHORT_ANSWERS = ["The answer is {value}.", "It is {value}.", "That makes {value}."]
ANSWERS = [*SHORT_ANSWERS, "{sum} is {value}.", "{sum} = {value}."]
DIVISION_ERROR = "error: division by zero"
NO_DIVISION = "It is undefined: nothing can be divided by zero."


@dataclass(frozen=True)
class Sum:
    """Two numbers and an operation."""

    operation: Operation
    a: Number
    b: Number

    def __str__(self) -> str:
        return f"{self.a} {self.operation.sign} {self.b}"

    @property
    def value(self) -> Number | None:
        """The result; None if it is a division by zero."""
        try:
            return self.operation.value(self.a, self.b)
        except ZeroDivisionError:
            return None

    def question(self, draw: Draw) -> str:
        """One of the ways to ask for it."""
        told = isinstance(self.a, int) and self.b != 0 and draw.chance(0.2)
        phrases = self.operation.stories if told else self.operation.questions
        name, things = draw.item(NAMES), draw.any(THINGS)
        return draw.phrase(phrases).format(a=self.a, b=self.b, name=name, things=things)


def drawn_sum(draw: Draw) -> Sum:
    """A sum of this side."""

    def make() -> Sum:
        operation, a, b = draw.any(OPERATIONS), draw.number(), draw.number()
        if operation.sign == "/":
            b = draw.number(3)
        if draw.chance(0.15):
            return Sum(operation, round(a / 100, 2), b)
        if operation.sign in "-/" and 0 < a < b and draw.chance(0.8):
            a, b = b, a
        return Sum(operation, a, b)

    return draw.content(make)


def whole_sum(draw: Draw, most: int) -> Sum:
    """A sum of whole numbers up to `most`, no division, of either side."""
    return Sum(draw.any(OPERATIONS[:3]), draw.whole(0, most), draw.whole(0, most))


def calculator(script: Script) -> tuple[str, str]:
    """Declare the conversation's calculator, one of many; its name and that of its parameter."""
    draw = script.draw
    name, key = script.once("calculator", lambda: (draw.any(CALCULATORS), draw.any(PARAMETERS)))
    script.declare(tool(name, ROUNDING, **{key: "string"}))
    return name, key


def calculate(script: Script, thought: list[str], expressions: list[str], values: list) -> None:
    """Call the conversation's calculator for each expression."""
    name, parameter = calculator(script)
    calls = [(name, {parameter: expression}) for expression in expressions]
    texts = [DIVISION_ERROR if value is None else result(script.draw, value) for value in values]
    script.call([*thought, f"I call {name}."], calls, texts)


def one_sum(script: Script) -> None:
    """A question, a call of the calculator, the answer; sometimes a question that goes on."""
    asked = drawn_sum(script.draw)
    script.ask(asked.question(script.draw))
    calculate(script, [f"The user wants {asked}.", "I do not guess."], [str(asked)], [asked.value])
    tell(script, asked)
    if asked.value is not None and script.draw.chance(0.25):
        go_on(script, asked.value)


def tell(script: Script, asked: Sum) -> None:
    """Say what the result is."""
    if asked.value is None:
        script.answer(["The tool gave an error."], NO_DIVISION, "undefined")
        return
    sentence = script.draw.any(ANSWERS).format(sum=asked, value=asked.value)
    script.answer([f"The result is {asked.value}."], sentence, asked.value)


def go_on(script: Script, value: Number) -> None:
    """A question about the result before."""
    draw = script.draw
    operation, phrases = draw.any(
        [
            (
                OPERATIONS[0],
                [
                    "and plus {b}?",
                    "add {b} to that.",
                    "now add {b}.",
                    "now plus {b}.",
                    "plus another {b}?",
                    "and {b} more?",
                    "plus {b}, please.",
                    "add {b} more.",
                    "and if you add {b}?",
                    "plus {b}?",
                ],
            ),
            (
                OPERATIONS[1],
                [
                    "and minus {b}?",
                    "subtract {b} from that.",
                    "minus {b}?",
                    "now subtract {b}.",
                    "take {b} away from it.",
                    "now minus {b}.",
                    "and if you take away {b}?",
                    "minus {b}, please.",
                    "now take {b} away.",
                ],
            ),
            (
                OPERATIONS[2],
                [
                    "and times {b}?",
                    "multiply that by {b}.",
                    "times {b}?",
                    "now multiply by {b}.",
                    "that times {b}?",
                    "times {b}, please.",
                    "and if you multiply it by {b}?",
                    "now times {b}.",
                ],
            ),
        ]
    )
    asked = draw.content(lambda: Sum(operation, value, draw.number(4)))
    script.user(draw.phrase(phrases).format(b=asked.b).capitalize())
    thought = [f"The result before was {value}.", f"The user wants {asked}."]
    calculate(script, thought, [str(asked)], [asked.value])
    tell(script, asked)


def two_sums(script: Script) -> None:
    """Two sums in one question: two calls at once."""
    draw = script.draw
    first, second = drawn_sum(draw), drawn_sum(draw)
    values = [first.value, second.value]
    if None in values:
        one_sum(script)
        return
    joined = draw.phrase(
        [
            "what is {}, and what is {}?",
            "compute {} and also {}.",
            "I need two results: {} and {}.",
            "work out both {} and {}.",
            "what are {} and {}?",
            "please work out {} as well as {}.",
            "what is {} as well as {}?",
            "I want to know {}, and {} as well.",
            "give me both {} and {}.",
            "give me the results of {} and {}.",
            "give me {} as well as {}.",
        ]
    )
    script.ask(joined.format(first, second))
    thought = [f"The user wants {first} and {second}.", "I make two calls at once."]
    calculate(script, thought, [str(first), str(second)], values)
    text = f"{first} is {values[0]}, and {second} is {values[1]}."
    script.say([f"The results are {values[0]} and {values[1]}."], text, *map(str, values))


def long_sum(script: Script) -> None:
    """Three numbers, brackets, one call."""
    draw = script.draw
    inner = draw.content(lambda: whole_sum(draw, 999))
    outer = Sum(draw.any(OPERATIONS[:3]), inner.value or 0, draw.whole(2, 99))
    expression, value = f"({inner}) {outer.operation.sign} {outer.b}", outer.value or 0
    phrases = [
        "what is {}?",
        "compute {}.",
        "{}?",
        "please evaluate this: {}",
        "can you evaluate this for me: {}?",
        "how much is {}?",
        "work out {}.",
        "evaluate the sum {}.",
        "give me the value of {}.",
        "evaluate {}.",
    ]
    script.ask(draw.phrase(phrases).format(expression))
    calculate(script, [f"The user wants {expression}.", "I do not guess."], [expression], [value])
    sentence = draw.any(ANSWERS).format(sum=expression, value=value)
    script.answer([f"The result is {value}."], sentence, value)


def declaration(operation: Operation) -> dict[str, Any]:
    """The tool that does one operation."""
    return tool(operation.name, f"Returns a {operation.sign} b.", a="number", b="number")


def one_operation(script: Script) -> None:
    """Tools of one operation each; the question needs one of them."""
    draw, asked = script.draw, drawn_sum(script.draw)
    script.ask(asked.question(draw))
    others = [operation for operation in OPERATIONS if operation is not asked.operation]
    offered = draw.some([asked.operation, *draw.some(others, draw.whole(0, 3))])
    script.declare(*map(declaration, offered))
    name = asked.operation.name
    given = {"a": asked.a, "b": asked.b}
    text = DIVISION_ERROR if asked.value is None else result(draw, asked.value)
    script.call([f"The user wants {asked}.", f"I call {name}."], [(name, given)], [text])
    tell(script, asked)


def in_steps(script: Script) -> None:
    """Tools of one operation each: the second call needs the first one's result."""
    draw = script.draw
    first = draw.content(lambda: whole_sum(draw, 9999))
    second = Sum(draw.any(OPERATIONS[:3]), first.value or 0, draw.number(3))
    verbs = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}
    then = verbs[second.operation.sign].format(second.b)
    script.ask(
        draw.phrase(
            [
                "take {first}, then {then}.",
                "compute {first}. Then {then}. What do you get?",
                "start with {first} and {then}.",
                "work out {first} first, then {then}.",
                "first compute {first}, and then {then}.",
                "begin with {first}. After that, {then}.",
                "after {first}, {then}.",
                "first {first}, then {then}: what is the result?",
                "I have {first}. Now {then}.",
                "first work out {first}, after that {then}.",
            ]
        ).format(first=first, then=then)
    )
    script.declare(*map(declaration, OPERATIONS))
    for step, asked in (("First", first), ("Then", second)):
        name = asked.operation.name
        thought = [f"{step} comes {asked}.", f"I call {name}."]
        script.call(thought, [(name, {"a": asked.a, "b": asked.b})], [result(draw, asked.value)])
    value = second.value or 0
    sentence = draw.any(SHORT_ANSWERS).format(value=value)
    script.answer([f"The last result is {value}."], sentence, value)


def by_heart(script: Script) -> None:
    """A sum of small numbers, and no tool; facts to know, so they are on both sides."""
    asked = whole_sum(script.draw, EASY)
    script.ask(asked.question(script.draw))
    tell(script, asked)


def no_calculator(script: Script) -> None:
    """A sum that is too large to guess, and no tool for it."""
    draw = script.draw
    asked = drawn_sum(draw)
    while max(asked.a, asked.b) <= EASY:
        asked = drawn_sum(draw)
    script.ask(asked.question(draw))
    thought = [f"The user wants {asked}.", "I have no calculator here.", "I must not guess."]
    sentence = draw.any(
        [
            "I cannot work that out without a calculator.",
            "I have no calculator here, and I will not guess.",
            "For that I need a calculator tool, which I do not have here.",
        ]
    )
    script.say(thought, script.form.aloud(sentence), script.form.aloud("calculator"))
