"""Grammars on the host: what they allow, what they refuse, and that messages follow them."""

import json
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from k3jax.chat import ChatOptions, ChatParser, encode, end_ids, render
from k3jax.chat.constrain import Calls, Form, constrain_message, constrain_text
from k3jax.guided import Guides
from k3jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(Path(__file__).parent.parent / "checkpoints" / "k3-tiny")
END_IDS = end_ids(TOKENIZER)
GUIDES = Guides(TOKENIZER, END_IDS)
END = TOKENIZER.control("<|end_of_msg|>")
INTEGER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def allowed(matcher):
    mask = np.zeros((1, -(-TOKENIZER.vocab_size // 32)), np.uint32)
    matcher.fill(mask)
    assert matcher.error is None
    return set(np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist())


def accepts(grammar, ids):
    """Whether a grammar lets these ids through one by one and is then complete."""
    GUIDES.check(grammar)
    matcher = GUIDES.matcher(grammar)
    for token in ids:
        if token not in allowed(matcher):
            return False
        matcher.advance([token])
    return matcher.is_complete


def answer_ids(*, thinking=True, **message):
    """What a model must say for the prompt to hold this message."""
    options = ChatOptions(thinking=thinking)
    ids = encode(TOKENIZER, render([{"role": "assistant", **message}], None, options))
    opening = encode(TOKENIZER, render([], None, options))
    return ids[len(opening) : len(ids) - len(opening)]


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Form("json_schema", INTEGER), '{"a": 12}', '{"a": "x"}'),
        (Form("json_schema", {"type": "object"}), '{"é": [1, null]}', "[1]"),
        (Form("regex", "[a-c]+/[0-9]{2}"), "abc/12", "abd"),
        (Form("choice", ["yes", "no", 'a "b"\n']), 'a "b"\n', "maybe"),
        (Form("grammar", 'root ::= "x" [0-9]+'), "x42", "y"),
        (Form("grammar", 'start: "x" /[0-9]+/'), "x42", "y"),
    ],
)
def test_forms(form, good, bad):
    text = constrain_text(form)
    assert accepts(text, TOKENIZER.encode(good))
    assert not accepts(text, TOKENIZER.encode(bad))
    for thinking in (False, True):
        message = constrain_message(TOKENIZER, thinking=thinking, form=form)
        said = answer_ids(content=good, reasoning_content="Hm: {", thinking=thinking)
        assert accepts(message, said)
        wrong = answer_ids(content=bad, reasoning_content="Hm", thinking=thinking)
        assert not accepts(message, wrong)
        assert not accepts(message, said[:-1])


def test_only_an_end_follows_a_whole_text():
    matcher = GUIDES.matcher(constrain_text(Form("choice", ["yes"])))
    assert allowed(matcher) == set(TOKENIZER.encode("y"))
    matcher.advance(TOKENIZER.encode("yes"))
    assert allowed(matcher) == set(END_IDS)
    matcher.advance([END])
    assert matcher.is_complete


NESTED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"const": {"x": [1, 2], "y": "p, q: r"}},
        "c": {"type": "object"},
    },
    "required": ["a", "b", "c"],
}


@pytest.mark.parametrize("schema", [NESTED, json.dumps(NESTED), {"type": "object"}])
def test_json_stands_on_one_line_with_a_blank_after_a_sign_at_most(schema):
    """A model that is unsure cannot lose itself in blanks."""
    grammar = constrain_text(Form("json_schema", schema))
    value = {"a": [1, 2], "b": {"x": [1, 2], "y": "p, q: r"}, "c": {"d": [], "e": {"f": None}}}
    said, compact = json.dumps(value), json.dumps(value, separators=(",", ":"))
    for good in (said, compact, said.replace('": ', '":'), compact.replace('":', '": ')):
        assert accepts(grammar, TOKENIZER.encode(good))
    more = [said.replace(sign, sign + blank, 1) for sign in "{[,:" for blank in " \n\t"]
    more += [said.replace(sign, " " + sign, 1) for sign in ":,]}"]
    for bad in (*more, json.dumps(value, indent=1), f" {said}", f"{said} "):
        assert json.loads(bad) == value
        assert not accepts(grammar, TOKENIZER.encode(bad))


def test_a_token_that_is_not_allowed_is_an_error():
    matcher = GUIDES.matcher(constrain_text(Form("choice", ["yes"])))
    matcher.advance(TOKENIZER.encode("no"))
    assert "cannot be followed" in matcher.error


def test_a_mask_of_another_shape_is_refused():
    matcher = GUIDES.matcher(constrain_text(Form("regex", "a")))
    with pytest.raises(ValueError, match=r"uint32\[T, 16\]"):
        matcher.fill(np.zeros((1, 16), np.int32))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form("regex", "(a"), "regex parse error: unclosed group"),
        (Form("json_schema", {"type": "banana"}), "banana"),
        (Form("json_schema", {"not": {"type": "string"}}), "not"),
        (Form("grammar", "start: other"), "other"),
        (Form("grammar", "root ::= ("), "."),
        (Form("choice", []), "at least one"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(form, reason):
    with pytest.raises(ValueError, match=reason):
        GUIDES.check(constrain_message(TOKENIZER, thinking=True, form=form))


HARD = {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**15}


def wide(count):
    """A schema with so many optional properties, each of a pattern of its own."""
    kinds = {
        f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,{n + 1}}}x{n}$"} for n in range(count)
    }
    return {"type": "object", "properties": kinds}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (
            Form("json_schema", wide(600)),
            "Current row has",
        ),  # of the parser, from its first sign on
        (Form("json_schema", wide(6000)), "250000 characters at most, this one"),
        (Form("json_schema", {**INTEGER, "properties": {"a": HARD}}), "fuel exhausted"),
    ],
)
def test_a_form_that_is_too_much_work_is_refused(form, reason):
    begin = time.thread_time()
    with pytest.raises(ValueError, match=reason):
        GUIDES.check(constrain_text(form))
    assert time.thread_time() - begin < 2.0


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F", 'say "K"']},
        "where": {"$ref": "#/$defs/place"},
        "more": {"type": ["array", "null"], "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


def tool(name, parameters=None):
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("free"), tool("none", {"additionalProperties": False})]


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("calls", "good"),
    [
        ([call("weather", city='Bern "x" <|close|>')], True),
        ([call("weather", city="Bern", days=3, unit='say "K"')], True),
        ([call("weather", city="B", where={"x": 1.5}, more=[{"x": 2}])], True),
        ([call("weather", city="B", more=None), call("free", a=1, b="x"), call("none")], True),
        ([], False),
        ([call("other")], False),
        ([call("weather")], False),
        ([call("weather", days=3)], False),
        ([call("weather", city="B", days=0)], False),
        ([call("weather", city="B", unit="K")], False),
        ([call("weather", city="B", more=[{"x": "y"}])], False),
        ([call("none", a=1)], False),
    ],
)
def test_calls(calls, good, thinking):
    grammar = constrain_message(TOKENIZER, thinking=thinking, calls=Calls(TOOLS))
    said = answer_ids(content="", reasoning_content="Hm", tool_calls=calls, thinking=thinking)
    assert accepts(grammar, said) is good


@pytest.mark.parametrize("name", ["weather", "free"])
@pytest.mark.parametrize(
    ("value", "good"),
    [('{"x": 1}', True), ('{"x":1}', True), ('{"x":  1}', False), ('{\n"x": 1}', False)],
)
def test_json_in_a_call_stands_on_one_line(name, value, good):
    options = ChatOptions(thinking=False)
    calls = [call(name, city="B", where={"x": 1})]
    segments = render([{"role": "assistant", "tool_calls": calls}], None, options)
    assert segments.count(('{"x": 1}', False)) == 1
    said = [(value, False) if text == '{"x": 1}' else (text, sign) for text, sign in segments]
    opening = len(encode(TOKENIZER, render([], None, options)))
    grammar = constrain_message(TOKENIZER, thinking=False, calls=Calls(TOOLS))
    assert accepts(grammar, encode(TOKENIZER, said)[opening:-opening]) is good


def test_one_call_only():
    grammar = constrain_message(TOKENIZER, thinking=False, calls=Calls(TOOLS, parallel=False))
    calls = [call("free", a=1), call("free", a=2)]
    assert accepts(grammar, answer_ids(thinking=False, tool_calls=calls[:1]))
    assert not accepts(grammar, answer_ids(thinking=False, tool_calls=calls))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", [None, Form("json_schema", {"type": "object"})])
def test_a_message_without_calls(form, thinking):
    """Nothing is asked but that there be no call: not even thinking may open anything."""
    grammar = constrain_message(TOKENIZER, thinking=thinking, form=form)
    said = {"content": "{}", "reasoning_content": "<|open|>tools", "thinking": thinking}
    assert accepts(grammar, answer_ids(**said))
    assert not accepts(grammar, answer_ids(**said, tool_calls=[call("free")]))
    matcher = GUIDES.matcher(grammar)
    opens, tags = TOKENIZER.control("<|open|>"), 0
    for token in answer_ids(**said):
        assert (opens in allowed(matcher)) == (token == opens)
        tags += token == opens
        matcher.advance([token])
    assert tags == thinking  # response


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("thinking", [False, True])
def test_whatever_is_sampled_under_a_mask_parses(seed, thinking):
    """A model that says anything that is allowed ends with a call whose arguments are JSON."""
    random = Random(seed)
    tools = [tool("f", {"properties": {"n": {"type": "integer"}}, "required": ["n"]})]
    calls = Calls(tools, parallel=False)
    matcher = GUIDES.matcher(constrain_message(TOKENIZER, thinking=thinking, calls=calls))
    parser = ChatParser(TOKENIZER, thinking=thinking)
    ids = []
    while END not in ids:
        assert len(ids) < 1000
        choices = sorted(allowed(matcher))
        control = [token for token in choices if TOKENIZER.is_control(token)]
        ids.append(random.choice(control or choices))
        matcher.advance(ids[-1:])
    events = parser.push(ids) + parser.finish()
    assert [event.text for event in events if event.kind == "call"] == ["f"]
    arguments = "".join(event.text for event in events if event.kind == "arguments")
    assert list(json.loads(arguments)) == ["n"]
