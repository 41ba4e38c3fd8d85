"""The model's ids to what it said: any cut of the stream, any malformed stream, nothing lost."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat import ChatEvent, ChatOptions, ChatParser, encode, message_of, render
from k3jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(Path(__file__).parent.parent / "checkpoints" / "k3-tiny")
CONTROLS = {
    "⟨": TOKENIZER.control("<|open|>"),
    "⟩": TOKENIZER.control("<|close|>"),
    "§": TOKENIZER.control("<|sep|>"),
    "■": TOKENIZER.control("<|end_of_msg|>"),
    "▣": TOKENIZER.control("[EOS]"),
    "▢": TOKENIZER.control("[BOS]"),
}


def ids_of(text):
    """Token ids of a text in which one sign stands for each control token: ⟨think§ is a tag."""
    ids = []
    for letter in text:
        ids += [CONTROLS[letter]] if letter in CONTROLS else TOKENIZER.encode(letter)
    return ids


def parse(stream, thinking=True):
    """Events of a stream given in pieces, neighbours of a kind joined."""
    parser = ChatParser(TOKENIZER, thinking=thinking)
    joined: list[ChatEvent] = []
    for event in [e for ids in stream for e in parser.push(ids)] + parser.finish():
        last = joined[-1] if joined else None
        if last and event.kind != "call" and (last.kind, last.index) == (event.kind, event.index):
            joined[-1] = ChatEvent(event.kind, last.text + event.text, event.index)
        else:
            joined.append(event)
    return joined


def said(text, thinking=True):
    return [(event.kind, event.text) for event in parse([ids_of(text)], thinking)]


CALL = '⟨tools§⟨call tool="f" index="1"§⟨argument key="a" type="number"§1⟩argument§⟩call§⟩tools§'
TAIL = "⟩message§■"


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        ("Hm.⟩think§⟨response§Yes.⟩response§" + TAIL, [("reasoning", "Hm."), ("content", "Yes.")]),
        ("⟩think§⟨response§Yes.⟩response§" + TAIL, [("content", "Yes.")]),
        ("⟨response§Yes.", [("content", "Yes.")]),  # the think channel skipped
        ("⟩think§\n\nYes.", [("content", "\n\nYes.")]),  # and the response tag too
        ("Hm.⟩think⟨response§Yes.", [("reasoning", "Hm."), ("content", "Yes.")]),  # no sep
        ("Hm.⟩think\nYes.", [("reasoning", "Hm."), ("content", "\nYes.")]),
        ("Hm.⟨response\nYes.", [("reasoning", "Hm."), ("content", "\nYes.")]),
        ("Hm.⟨response Yes", [("reasoning", "Hm."), ("content", " Yes")]),
        ("Hm.⟨response yes", [("reasoning", "Hm."), ("content", " yes")]),
        ("Hm." + CALL, [("reasoning", "Hm."), ("call", "f"), ("arguments", '{"a": 1}')]),
        ("Hm.⟩think§ \n ⟨tools§\n■", [("reasoning", "Hm.")]),  # blanks between tags
        ("Hm.⟨foo§bar", [("reasoning", "Hm.foobar")]),  # no such tag
        ("Hm.⟩thinking of", [("reasoning", "Hm.thinking of")]),
        ("Hm.⟨Once upon a time§", [("reasoning", "Hm.Once upon a time")]),
        ("Hm.⟨⟨⟩§§⟨response§Yes⟨", [("reasoning", "Hm."), ("content", "Yes")]),
        ("Hm.⟩thi", [("reasoning", "Hm.")]),  # the stream ends inside a tag
        ('Hm.⟨call tool="get', [("reasoning", "Hm.")]),
        ('Hm.⟨call tool="get some rest', [("reasoning", 'Hm.call tool="get some rest')]),
        ('Hm.⟨call tool="get;', [("reasoning", 'Hm.call tool="get;')]),
        ('⟨response lang="de"§Ja', [("content", "Ja")]),  # an unknown attribute
        ('⟨response lang="de', [("content", ' lang="de')]),
        ("Hm.■more", [("reasoning", "Hm."), ("content", "more")]),  # ends ignored
        ("Hm.▣more", [("reasoning", "Hm."), ("content", "more")]),
        ("H▢m.", [("reasoning", "Hm.")]),
        ('⟨argument key="a"§x', [("reasoning", 'argument key="a"x')]),  # no call is open
        ("⟨call§x", [("reasoning", "callx")]),  # a call of nothing
    ],
)
def test_streams(stream, events):
    assert said(stream) == events


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", "{}"),
        ('⟨argument key="s" type="string"§a "b"\n⟩argument§', '{"s": "a \\"b\\"\\n"}'),
        ('⟨argument key="n" type="number"§ 1.5 ⟩argument§', '{"n": 1.5}'),
        ('⟨argument key="n" type="number"§NaN⟩argument§', '{"n": "NaN"}'),
        ('⟨argument key="n" type="number"§1 or 2⟩argument§', '{"n": "1 or 2"}'),
        ('⟨argument key="o" type="object"§{"k": [1]}⟩argument§', '{"o": {"k": [1]}}'),
        ('⟨argument key="x"§true⟩argument§', '{"x": true}'),
        ('⟨argument key="a&quot;&amp;quot;" type="null"§null⟩argument§', '{"a\\"&quot;": null}'),
        (
            '⟨argument key="a" type="string"§x⟨argument key="b" type="number"§2',
            '{"a": "x", "b": 2}',
        ),
        ('⟨json type="object"§{"a": ⟩json§', '{"a": '),  # passed on as it is
        ('⟨json type="object"§⟩json§', "{}"),
    ],
)
def test_arguments(inside, arguments):
    for end in ("⟩call§⟩tools§" + TAIL, "⟩call§", "⟩call", "⟩tools§", "■", "⟨response§"):
        stream = f'⟨tools§⟨call tool="f" index="1"§{inside}{end}'
        got = said(stream, thinking=False)
        assert got == [("call", "f"), ("arguments", arguments)]


def test_a_call_cut_short_never_looks_complete():
    stream = ids_of(CALL.replace("§1⟩", "§12⟩"))
    whole = parse([stream], thinking=False)[-1].text
    for end in range(len(stream)):
        events = parse([stream[:end]], thinking=False)
        text = "".join(event.text for event in events if event.kind == "arguments")
        assert whole.startswith(text)
        with_call_closed = end >= len(ids_of(CALL.partition("⟩call")[0] + "1⟩call"))
        assert (text == whole) == with_call_closed


def test_several_calls_are_numbered():
    events = parse([ids_of("Hm." + CALL + CALL.replace('"f"', '"g&amp;"'))])
    assert [(e.kind, e.text, e.index) for e in events if e.kind == "call"] == [
        ("call", "f", 0),
        ("call", "g&", 1),
    ]


def test_content_is_not_held_back():
    parser = ChatParser(TOKENIZER, thinking=False)
    for letter in "Hello, world":
        assert parser.push(TOKENIZER.encode(letter)) == [ChatEvent("content", letter)]


def test_a_tag_that_never_ends_is_not_held_for_ever():
    parser = ChatParser(TOKENIZER, thinking=False)
    events = parser.push(ids_of('⟨call tool="' + "x" * 5000))
    assert sum(len(event.text) for event in events) == len('call tool="') + 5000


NAMES = ["message", "think", "response", "tools", "call", "argument", "json", "resp", "foo", ""]
TAGS = [
    'message role="assistant"',
    'call tool="f" index="1"',
    'call tool="g"',
    'argument key="a" type="string"',
    'argument key="b" type="number"',
    'argument key="c"',
    'json type="object"',
    'call tool="h',
    "call tool=",
    'argument key="k',
]
markup = st.one_of(
    st.sampled_from([*CONTROLS, "\n", " "]),
    st.sampled_from([*NAMES, *TAGS]),
    st.builds("⟨{}§".format, st.sampled_from([*NAMES, *TAGS])),
    st.builds("⟩{}§".format, st.sampled_from(NAMES)),
)


@st.composite
def streams_with_words(draw):
    """Markup, whole and broken, with numbered words strewn in; whether the words follow anything
    that could still become an attribute does not matter: a word begins like none."""
    parts = draw(st.lists(st.one_of(markup, st.just("word")), max_size=25))
    words = []
    for number, part in enumerate(parts):
        if part == "word":
            words.append(f"W{number};")
            parts[number] = words[-1]
    return "".join(parts), words


@settings(max_examples=600)
@given(streams_with_words(), st.booleans())
def test_no_word_is_lost(stream, thinking):
    text, words = stream
    everything = "".join(event.text for event in parse([ids_of(text)], thinking))
    for word in words:
        assert everything.count(word) == 1


any_ids = st.one_of(
    st.lists(st.integers(0, 511), max_size=60),
    st.lists(st.one_of(markup, st.text(max_size=4)), max_size=20).map(
        lambda parts: ids_of("".join(parts))
    ),
)


@settings(max_examples=400)
@given(any_ids, st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_the_parse_does_not_depend_on_the_cuts(ids, cuts, thinking):
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    stream = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert parse(stream, thinking) == parse([ids], thinking)
    assert parse([[token] for token in ids], thinking) == parse([ids], thinking)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
calls = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_weather", 'a"&b']),
        st.dictionaries(st.text(max_size=5), values, max_size=3),
    ),
    max_size=3,
)
reasonings = st.text(max_size=10).filter(lambda text: not text or text.strip())


@settings(max_examples=200)
@given(reasonings, st.text(max_size=10), calls, st.booleans())
def test_what_the_prompt_says_of_an_answer_parses_back(reasoning, content, calls, thinking):
    message = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    options = ChatOptions(thinking=thinking)
    ids = encode(TOKENIZER, render([message], None, options))
    opening = encode(TOKENIZER, render([], None, options))
    events = parse([ids[len(opening) : len(ids) - len(opening)]], thinking)
    found = message_of(events)
    assert found["content"] == content
    assert found.get("reasoning_content", "") == reasoning * thinking
    made = [call["function"] for call in found.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == calls
    assert message_of(event for event in events if event.kind == "content") == {
        "role": "assistant",
        "content": content,
    }
