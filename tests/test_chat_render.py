"""Conversations to prompts: exact on the recorded cases; user text stays text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat import ChatOptions, encode, end_ids, render
from k3jax.tokenizer import Tokenizer

ROOT = Path(__file__).parent
TOKENIZER = Tokenizer.from_directory(ROOT.parent / "checkpoints" / "k3-tiny")
CASES = json.loads((ROOT / "golden" / "chat" / "chat.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_cases(case):
    segments = render(case["messages"], case["tools"], ChatOptions(**case["options"]))
    assert [list(segment) for segment in segments] == case["segments"]
    assert "".join(text for text, _ in segments) == case["rendered"]
    assert TOKENIZER.decode(encode(TOKENIZER, segments)) == case["rendered"]


def test_there_are_seventeen_cases():
    assert len({case["name"] for case in CASES}) == 17


def user(text):
    return [{"role": "user", "content": text}]


@given(st.text() | st.sampled_from(["<|open|>", "<|end_of_msg|>", "[EOS]", "[BOS]<|sep|>"]))
def test_user_text_never_becomes_a_control_token(text):
    ids = encode(TOKENIZER, render(user(text)))
    empty = encode(TOKENIZER, render(user("")))
    controls = [token for token in ids if TOKENIZER.is_control(token)]
    assert controls == [token for token in empty if TOKENIZER.is_control(token)]


def answer(*calls):
    return [*user("Go"), {"role": "assistant", "tool_calls": list(calls)}]


def call(name="f", arguments=None, identifier="c1"):
    return {"id": identifier, "function": {"name": name, "arguments": arguments}}


def text_of(messages, **options):
    return "".join(text for text, _ in render(messages, None, ChatOptions(**options)))


def test_no_arguments_and_blank_arguments_are_the_same():
    assert text_of(answer(call(arguments=" "))) == text_of(answer(call(arguments={})))


def test_a_result_that_matches_no_call_leaves_its_run_as_given():
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "one"},
        {"role": "tool", "tool_call_id": "x", "content": "two"},
    ]
    text = text_of([*answer(call("f", identifier="a"), call("g", identifier="b")), *results])
    assert 'tool="f" index="1"<|sep|>one' in text
    assert 'tool="g" index="2"<|sep|>two' in text


def test_the_matched_call_names_the_result():
    result = {"role": "tool", "tool_call_id": "c1", "name": "stale", "content": "x"}
    assert 'role="tool" tool="f" index="1"' in text_of([*answer(call()), result])


def test_attributes_escape_ampersands_and_quotes_only():
    messages = [{"role": "user", "name": "<a&b>'\"&quot;", "content": ""}]
    assert ' name="<a&amp;b>\'&quot;&amp;quot;"' in text_of(messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], r"messages\[0\]: role must be .* got 'robot'"),
        (answer(call(arguments="[1]")), r"messages\[1\]: .* must be a JSON object, got '\[1\]'"),
        (answer(call(arguments=3)), "must be an object or the JSON text of one"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\]: a tool result needs a name"),
        (user([{"type": "image_url", "image_url": {}}]), "not a part of type 'image_url'"),
    ],
)
def test_what_cannot_be_said_is_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        render(messages)


def test_deep_values_are_refused_and_deep_texts_passed_on():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        render(answer(call(arguments={"x": deep})))
    with pytest.raises(ValueError, match="nested too deeply"):
        render(user("x"), [{"type": "function", "deep": deep}])
    text = '{"x": ' + "[" * 100_000
    assert text in text_of(answer(call(arguments=text)))


def test_unknown_effort_is_refused_unless_thinking_is_off():
    with pytest.raises(ValueError, match="must be one of low, medium, high, max, got 'huge'"):
        render(user("x"), None, ChatOptions(thinking_effort="huge"))
    assert "huge" not in text_of(user("x"), thinking=False, thinking_effort="huge")


def test_answers_end_with_end_of_message_or_end_of_text():
    assert end_ids(TOKENIZER) == [258, 509]
