"""Conversations: the same for a seed, split by content, really right, and read back as made."""

import ast
import json
import operator
import re
from datetime import date, timedelta
from pathlib import Path

import pytest

from checkpoints.recipe.conversations import TOPICS, conversation, make
from checkpoints.recipe.draw import Draw, is_held
from checkpoints.recipe.script import Expected
from checkpoints.recipe.topics import coding, facts
from checkpoints.recipe.topics.words import CITIES, NAMES, NOUNS
from k3jax.chat import ChatParser, encode, message_of
from k3jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[2] / "checkpoints" / "k3-tiny")
COUNT = 1000
SIDES = {held: list(make(3, COUNT, held=held)) for held in (False, True)}
EVERY = [made for side in SIDES.values() for made in side]
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def test_the_same_seed_makes_the_same_conversations():
    assert list(make(3, 50, held=False)) == SIDES[False][:50]
    assert list(make(4, 50, held=False)) != SIDES[False][:50]


def test_every_topic_comes_up_on_both_sides():
    for side in SIDES.values():
        assert {made.kind for made in side} == set(TOPICS)


def said(made):
    """All text that a conversation's author chose: what is said, called and returned."""
    for message in made.messages:
        yield message.get("content") or ""
        for call in message.get("tool_calls", ()):
            yield " ".join(map(str, json.loads(call["function"]["arguments"]).values()))


def sums(made):
    """The expressions that are calculated."""
    for message in made.messages:
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            for value in given.values():
                if isinstance(value, str) and re.fullmatch(r"[\d.-]+ [-+*/] [\d.-]+", value):
                    yield value


@pytest.mark.parametrize("held", [False, True])
def test_sums_are_of_one_side(held):
    found = {expression for made in SIDES[held] for expression in sums(made)}
    assert len(found) > 200
    assert {is_held(expression) for expression in found} == {held}


def dates(made):
    """The dates that tools are asked about."""
    for message in made.messages:
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            yield from (given[key] for key in ("date", "start") if "-" in str(given.get(key)))


@pytest.mark.parametrize("held", [False, True])
def test_dates_are_of_one_side(held):
    found = {day for made in SIDES[held] for day in dates(made)}
    assert len(found) > 50
    assert {is_held(day) for day in found} == {held}


@pytest.mark.parametrize("pool", [NOUNS, NAMES, CITIES], ids=["nouns", "names", "cities"])
def test_words_names_and_cities_are_of_one_side(pool):
    for held, side in SIDES.items():
        words = {word for made in side for text in said(made) for word in re.findall(r"\w+", text)}
        found = words & set(pool)
        assert len(found) > (3 if held else 40)
        assert {is_held(word) for word in found} == {held}


def phrases_of_a_fact(made):
    return {message["content"].lower() for message in made.messages if message["role"] == "user"}


def test_the_last_way_to_say_a_thing_is_only_held_out():
    last = {questions[-1].lower() for questions, _, _ in (*facts.ABOUT_ITSELF, *facts.MANNERS)}
    asked = {held: set().union(*map(phrases_of_a_fact, side)) for held, side in SIDES.items()}
    assert not last & asked[False]
    assert last & asked[True]


def parsed(tokenizer, turn, thinking):
    """What the server's parser reads in an answer: reasoning, content and calls."""
    parser = ChatParser(tokenizer, thinking=thinking)
    message = message_of(parser.push(encode(tokenizer, turn.answer)) + parser.finish())
    calls = [call["function"] for call in message.get("tool_calls", ())]
    given = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return message.get("reasoning_content", ""), message["content"], given


def test_answers_are_parsed_as_they_were_made_and_are_what_is_expected():
    for made in EVERY:
        for place, turn in zip(made.expected, made.turns(), strict=True):
            message = made.messages[place]
            reasoning, content, calls = parsed(TOKENIZER, turn, made.options.thinking)
            assert reasoning == message.get("reasoning_content", "")
            assert content == message["content"]
            assert turn.expected.problems(content, calls) == []


def test_a_conversation_is_its_last_prompt_and_answer_with_every_answer_marked():
    for made in EVERY:
        segments, learned = made.segments()
        turns = list(made.turns())
        assert segments == [*turns[-1].prompt, *turns[-1].answer]
        assert sum(learned) == sum(len(turn.answer) for turn in turns)
        assert segments[-1] == ("<|end_of_msg|>", True)
        assert learned[-1]


def test_thinking_is_off_or_as_long_as_the_effort_says():
    low, most = [], []
    for made in EVERY:
        for place in made.expected:
            reasoning = made.messages[place].get("reasoning_content")
            assert (reasoning is None) == (not made.options.thinking)
            if made.options.thinking_effort == "low":
                low.append(len(reasoning))
            elif made.options.thinking_effort == "max":
                most.append(len(reasoning))
    assert sum(low) / len(low) < 0.7 * sum(most) / len(most)


def results(made):
    """Pairs of a call and its result."""
    calls = {}
    for message in made.messages:
        for call in message.get("tool_calls", ()):
            calls[call["id"]] = call["function"]
        if message["role"] == "tool":
            function = calls[message["tool_call_id"]]
            text = message["content"]
            value = next(iter(json.loads(text).values())) if text.startswith("{") else text
            yield function["name"], json.loads(function["arguments"]), str(value)


def evaluated(node):
    """The value of a sum's syntax tree, computed without the code under test."""
    match node:
        case ast.Expression(body=body):
            return evaluated(body)
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(operand=operand):
            return -evaluated(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return evaluated(left) / evaluated(right)
        case ast.BinOp(left=left, op=op, right=right):
            return SIGNS[type(op)](evaluated(left), evaluated(right))
    raise ValueError(ast.dump(node))


def worked_out(name, given):
    """What a tool must return, or None if this test does not know the tool."""
    values = list(given.values())
    if len(values) == 1 and re.fullmatch(r"[\d.()-]+ [-+*/] .+", str(values[0])):
        return evaluated(ast.parse(values[0], mode="eval"))
    match name:
        case "add" | "subtract" | "multiply":
            sign = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}[name]
            return sign(given["a"], given["b"])
        case "divide":
            return given["a"] / given["b"]
        case "weekday":
            return f"{date.fromisoformat(given['date']):%A}"
        case "add_days":
            return (date.fromisoformat(given["date"]) + timedelta(given["days"])).isoformat()
        case "days_between":
            start, end = (date.fromisoformat(given[key]) for key in ("start", "end"))
            return (end - start).days
        case "reverse_text":
            return "".join(reversed(given["text"]))
        case "count_letter":
            return len(re.findall(given["letter"], given["text"]))
    return None


def test_tools_return_what_is_right():
    checked = 0
    for name, given, value in (each for made in EVERY for each in results(made)):
        try:
            expected = worked_out(name, given)
        except ZeroDivisionError:
            assert value == "error: division by zero"
            continue
        if isinstance(expected, int | float):
            assert float(value) == pytest.approx(expected, abs=6e-5, rel=1e-12)
        elif expected is not None:
            assert value == expected
        checked += expected is not None
    assert checked > 500


@pytest.mark.parametrize("task", coding.SNIPPETS)
def test_code_compiles(task):
    compile(coding.SNIPPETS[task], task, "exec")


def test_expectations_name_every_problem():
    sums = (made for made in EVERY if made.kind == "arithmetic" and len(made.expected) > 1)
    call, answer = list(next(sums).expected.values())[:2]
    assert call.problems("", call.calls) == []
    assert len(call.problems("", [])) == 1
    assert len(call.problems("hm", [])) == 2
    assert answer.problems("nothing of the kind", []) != []
    assert Expected(number="17").problems("12 + 5 = 17.", []) == []
    for wrong in ("17 - 5 = 12.", "170", "-17", "1.7", "It is 17.5"):
        assert len(Expected(number="17").problems(wrong, [])) == 1
    assert Expected(contains=("owl",)).problems("The owl.", []) == []
    assert len(Expected(contains=("owl", "15")).problems("A bowl of 15.2", [])) == 2
    assert len(Expected(contains=("A",), capitals=True).problems("A b", [])) == 1


@pytest.mark.parametrize("kind", ["arithmetic", "table", "service, parallel"])
def test_a_kind_can_be_asked_for(kind):
    assert conversation(Draw("any", held=True), kind).kind == kind
