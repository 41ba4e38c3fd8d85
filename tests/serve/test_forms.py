"""What is asked of an answer's form reaches the engine as a grammar that the answer fits."""

import threading

import msgspec
import pytest
from fake_engine import INFO, TOKENIZER, ids_of, script

from k3jax.chat import end_ids
from k3jax.guided import Guides

GUIDES = Guides(TOKENIZER, end_ids(TOKENIZER))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
END = "⟩message§■"


def chat(server, **fields):
    """The reply to a chat and the grammar and prompt that the engine got."""
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    request = list(server.link.requests.values())[-1]
    return request.params.grammar, TOKENIZER.decode(request.prompt_ids)


def fits(grammar, text):
    matcher = GUIDES.matcher(grammar)
    matcher.advance(ids_of(text))
    return matcher.error is None and matcher.is_complete


def answer(content):
    return f"Hm.⟩think§⟨response§{content}⟩response§{END}"


def calls(*names, argument='⟨argument key="a" type="number"§1⟩argument§'):
    said = "".join(
        f'⟨call tool="{name}" index="{number}"§{argument}⟩call§'
        for number, name in enumerate(names, 1)
    )
    return f"Hm.⟩think§⟨response§⟩response§⟨tools§{said}⟩tools§{END}"


def test_nothing_is_constrained_unasked(server):
    assert chat(server, tools=TOOLS)[0] is None
    assert chat(server, response_format={"type": "text"}, guided_json=None)[0] is None
    assert chat(server, tool_choice="none")[0] is None


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"a": 1}',
            '{"b": 1}',
        ),
        ({"response_format": {"type": "regex", "pattern": "[ab]+"}}, "abba", "abc"),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, "a", "b"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
        ({"ebnf": 'root ::= "x" | "y"'}, "y", "z"),
    ],
)
def test_forms(server, fields, good, bad):
    grammar, prompt = chat(server, **fields)
    assert fits(grammar, answer(good))
    assert not fits(grammar, answer(bad))
    kind = fields.get("response_format", {}).get("type")
    asked = f"`response_format={kind}`" in prompt
    assert asked == (kind in ("json_object", "json_schema"))
    response = server.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 200
    grammar = list(server.link.requests.values())[-1].params.grammar
    assert (fits(grammar, good), fits(grammar, bad)) == (True, False)


def test_tool_choice(server):
    required, prompt = chat(server, tools=TOOLS, tool_choice="required")
    assert "tool_choice=required" in prompt
    assert fits(required, calls("f"))
    assert fits(required, calls("f", "g"))
    assert not fits(required, answer("no"))
    assert not fits(required, calls("h"))
    named = {"type": "function", "function": {"name": "f"}}
    one, prompt = chat(server, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
    assert "tool_choice=required" in prompt
    assert [fits(one, calls(*names)) for names in ("f", "g", "ff")] == [True, False, False]


def without_thinking(said):
    return said.partition("⟨response§")[2]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]},
        {"messages": [{"role": "system", "tools": TOOLS}, {"role": "user", "content": "x"}]},
    ],
)
def test_no_call_can_be_said_if_none_is_asked_for(server, fields, thinking):
    grammar, prompt = chat(server, tool_choice="none", thinking=thinking, **fields)
    assert "MUST NOT call any tools" in prompt
    begin = str if thinking else without_thinking
    assert fits(grammar, begin(answer("{}")))
    assert not fits(grammar, begin(calls("f")))
    tools = calls("f").partition("⟩response§")[2]
    assert not fits(grammar, begin(answer("{}").removesuffix(END) + tools))
    if "response_format" in fields:
        assert not fits(grammar, begin(answer("no")))


def test_responses_hold_no_call_if_none_is_asked_for(server):
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = {"input": "x", "tools": [tool], "tool_choice": "none"}
    assert server.http.post("/v1/responses", json=body).status_code == 200
    grammar = list(server.link.requests.values())[-1].params.grammar
    assert fits(grammar, answer("x"))
    assert not fits(grammar, calls("f"))


def test_tools_that_a_system_message_declares_can_be_required(server):
    messages = [{"role": "system", "tools": TOOLS[1:]}, {"role": "user", "content": "x"}]
    grammar, prompt = chat(server, messages=messages, tools=TOOLS[:1], tool_choice="required")
    assert "New Tools Available" in prompt
    assert fits(grammar, calls("g", "f"))


def test_strict_tools_constrain_the_arguments_of_calls_that_are_free(server):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    grammar, _ = chat(server, tools=strict)
    assert fits(grammar, answer("anything"))
    assert fits(grammar, calls("f"))
    assert not fits(grammar, calls("f", argument=""))


def test_a_form_leaves_tools_to_be_called(server):
    grammar, _ = chat(server, tools=TOOLS, response_format={"type": "json_object"})
    assert fits(grammar, answer("{}"))
    assert fits(grammar, calls("g"))
    assert not fits(grammar, answer("no"))


def test_one_call_only_if_asked_for_without_a_grammar(server):
    said = script(calls("f", "g"))
    body = {"messages": [{"role": "user", "content": said}], "tools": TOOLS}
    for once, names in ((True, ["f", "g"]), (False, ["f"])):
        body["parallel_tool_calls"] = once
        choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object"),
        ({"response_format": {"type": "regex"}}, "response_format", "must be a text"),
        ({"guided_regex": "(a"}, "response_format", "cannot be read"),
        ({"guided_json": {"type": "banana"}}, "response_format", "banana"),
        ({"guided_json": "no JSON"}, "response_format", "cannot be read"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "one form"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, None, "one form"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, None, "one form"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "not offered"),
        ({"guided_choice": []}, "structured_outputs.choice", "at least 1"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "where to end"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "where to end"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_form_that_cannot_be_read(server, route, fields, param, message):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    response = server.http.post(route, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == (param or "structured_outputs")
    assert message in error["message"]


def test_parameters_of_a_tool_that_cannot_be_read(server):
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "banana"}}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    error = server.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "tools"
    assert "a tool's parameters cannot be read: " in error["message"]
    assert "banana" in error["message"]


def test_an_engine_without_grammars_refuses_them(make_server):
    server = make_server()
    server.client.metrics.info = msgspec.structs.replace(INFO, guided=False)
    response = server.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})
    assert response.status_code == 400
    assert "not offered" in response.json()["error"]["message"]


def test_a_form_that_is_too_much_work_is_refused_and_holds_nobody_up(server):
    """The one here keeps a core busy, and then its many keys are too many for the parser."""
    kinds = {
        f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,{n + 1}}}x{n}$"} for n in range(3000)
    }
    body = {"prompt": "x", "guided_json": {"type": "object", "properties": kinds}}
    replies = []

    def ask():
        replies.append(server.http.post("/v1/completions", json=body))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    served = 0
    while any(thread.is_alive() for thread in threads):
        reply = server.http.post("/v1/completions", json={"prompt": script("right■")})
        assert reply.json()["choices"][0]["text"] == "right"
        served += 1
    assert served > 10
    assert [reply.status_code for reply in replies] == [400] * 2
    error = replies[0].json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "Current row has" in error["message"]
