"""The four operations: their signs, the tools that do them, and how one asks for them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

Number = int | float


@dataclass(frozen=True)
class Operation:
    """An operation: its sign, the tool that does it, how it is asked for, and stories about it."""

    sign: str
    name: str
    run: Callable[[Number, Number], Number]
    questions: tuple[str, ...]
    stories: tuple[str, ...]

    def value(self, a: Number, b: Number) -> Number:
        """The result, to four places at most; ZeroDivisionError if there is none."""
        value = round(self.run(a, b), 4)
        return int(value) if value == int(value) else value


OPERATIONS = (
    Operation(
        "+",
        "add",
        operator.add,
        (
            "what is {a} + {b}?",
            "what is {a}+{b}?",
            "add {a} and {b}.",
            "what is {a} plus {b}?",
            "what is the sum of {a} and {b}?",
            "compute {a} + {b}.",
            "{a} + {b}?",
            "{a} + {b} =",
            "{a}+{b}",
            "how much is {a} plus {b}?",
            "work out {a} + {b}.",
            "please add {a} and {b}.",
            "find the sum of {a} and {b}, please.",
            "please work out {a} plus {b}.",
        ),
        (
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            "There are {a} {things} in one box and {b} in another. How many are there together?",
            "{name} sold {a} {things} on Monday and {b} on Tuesday. How many {things} in all?",
            "{a} {things} arrive in the morning and {b} at night. How many arrive in all?",
            "{name} keeps a shop with {a} {things} and buys {b} more. How many {things} is that?",
            "In a shop are {a} {things}, and {b} more arrive. How many does the shop have then?",
            "First {a} {things} come, then {b} more. How many {things} are there now?",
            "A shop has {a} {things}. Then {b} more arrive. How many {things} are in the shop?",
        ),
    ),
    Operation(
        "-",
        "subtract",
        operator.sub,
        (
            "what is {a} - {b}?",
            "what is {a}-{b}?",
            "subtract {b} from {a}.",
            "what is {a} minus {b}?",
            "what is the difference of {a} and {b}?",
            "compute {a} - {b}.",
            "{a} - {b}?",
            "{a} - {b} =",
            "{a}-{b}",
            "take {b} away from {a}.",
            "work out {a} minus {b}.",
            "{a} minus {b}?",
            "please subtract {b} from {a}.",
            "how much is {a} - {b}?",
            "what remains of {a} without {b}?",
            "what is {a} less {b}?",
            "how much is {a} minus {b}?",
        ),
        (
            "{name} has {a} {things} and gives {b} away. How many {things} are left?",
            "There were {a} {things} in a box. {name} took {b}. How many are still there?",
            "{name} had {a} {things} and sold {b} of them. How many are left?",
            "A shop sold {b} of its {a} {things}. How many {things} does it still have?",
            "Of {a} {things}, {b} are gone. How many {things} remain?",
            "The shop had {a} {things}, but {name} bought {b}. How many {things} are left there?",
            "{b} of {a} {things} were sold. How many remain in the shop?",
            "A shop had {a} {things} and sold {b}. How many {things} remain?",
        ),
    ),
    Operation(
        "*",
        "multiply",
        operator.mul,
        (
            "what is {a} * {b}?",
            "what is {a}*{b}?",
            "multiply {a} by {b}.",
            "what is {a} times {b}?",
            "what is the product of {a} and {b}?",
            "compute {a} * {b}.",
            "{a} x {b}?",
            "{a} * {b} =",
            "{a}*{b}",
            "how much is {a} times {b}?",
            "work out {a} * {b}.",
            "{a} times {b}?",
            "please multiply {a} by {b}.",
            "find the product of {a} and {b}, please.",
            "please work out {a} times {b}.",
        ),
        (
            "{name} buys {a} boxes with {b} {things} each. How many {things} are that?",
            "There are {a} rows of {b} {things}. How many {things} are there?",
            "{a} people have {b} {things} each. How many {things} do they have in all?",
            "Each of {a} boxes holds {b} {things}. How many {things} are in the boxes together?",
            "In each of {a} rooms there are {b} {things}. How many {things} is that?",
            "{a} people buy {b} {things} each. How many {things} do these people buy together?",
            "Each of {a} people has {b} {things}. How many {things} do they have together?",
        ),
    ),
    Operation(
        "/",
        "divide",
        operator.truediv,
        (
            "what is {a} / {b}?",
            "what is {a}/{b}?",
            "divide {a} by {b}.",
            "what is {a} divided by {b}?",
            "compute {a} / {b}.",
            "{a} / {b}?",
            "{a} / {b} =",
            "{a}/{b}",
            "how much is {a} divided by {b}?",
            "give me the quotient of {a} and {b}.",
            "find the quotient {a} / {b}.",
            "work out {a} divided by {b}.",
            "I need the quotient of {a} by {b}.",
            "compute the quotient when {a} is divided by {b}.",
            "please divide {a} by {b}.",
            "how often does {b} go into {a}?",
            "what is the quotient of {a} and {b}?",
        ),
        (
            "{name} shares {a} {things} among {b} people. How many does each one get?",
            "{a} {things} are packed into {b} boxes. How many go into each box?",
            "If {b} people share {a} {things}, how many does each of them get?",
            "{b} friends share {a} {things} evenly. How many does each one get?",
            "{a} {things} lie evenly on {b} tables. How many {things} are on each?",
            "If {name} puts {a} {things} evenly into {b} boxes, how many are in each box?",
            "On {b} tables there are {a} {things}, as many on each table. How many is that?",
            "If {b} tables share {a} {things} evenly, how many are on each table?",
        ),
    ),
)
