"""/v1/chat/completions over real HTTP: reasoning, content, calls, and what is refused."""

import json

import pytest
from fake_engine import TOKENIZER, script
from hypothesis import given, settings
from hypothesis import strategies as st

CALL = (
    '⟨call tool="f" index="1"§⟨argument key="a" type="string"§x"y⟩argument§'
    '⟨argument key="b" type="number"§2⟩argument§⟩call§'
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def user(text):
    return [{"role": "user", "content": text}]


def post(server, messages, **fields):
    response = server.http.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def say(server, text, **fields):
    """The one choice of a reply in which the model says a text."""
    return post(server, user(script(text)), **fields)["choices"][0]


def stream(server, text, group=1, **fields):
    body = {"messages": user(script(text, group=group)), "stream": True, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def last_prompt(server):
    return TOKENIZER.decode(list(server.link.requests.values())[-1].prompt_ids)


def test_reasoning_and_content(server):
    said = "Hm.⟩think§⟨response§Yes.⟩response§⟩message§■"
    reply = post(server, user(script(said, cached=9)))
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Yes.",
                "reasoning_content": "Hm.",
                "reasoning": "Hm.",
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply["object"] == "chat.completion"
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
    details = reply["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("Hm.⟩think§")


def test_calls(server):
    choice = say(server, f"⟩think§⟨tools§{CALL}{CALL.replace('f', 'g')}⟩tools§⟩message§■")
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 'x"y', "b": 2}
    assert all(call["type"] == "function" for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_call_cut_short_does_not_finish_as_a_call(server):
    choice = say(server, f"⟩think§⟨tools§{CALL}", max_tokens=60)
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


def fold(chunks):
    """What a client makes of the chunks of a stream with one choice."""
    message = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                known = message["calls"].setdefault(call["index"], {"arguments": ""})
                known["name"] = call["function"].get("name", known.get("name"))
                known["arguments"] += call["function"]["arguments"]
    return message


pieces = st.sampled_from(["Hm", "⟩think§", "⟨response§", "Yés", "⟩response§", "⟨tools§", CALL, "§"])


@settings(max_examples=40)
@given(st.lists(pieces, max_size=6), st.integers(1, 5), st.booleans())
def test_the_stream_says_what_the_reply_says(server, parts, group, thinking):
    text = "".join(parts)
    fields = {"thinking": thinking, "logprobs": True, "top_logprobs": 1}
    chunks = stream(server, text, group, stream_options={"include_usage": True}, **fields)
    whole = post(server, user(script(text, group=group)), **fields)
    assert chunks[-1]["usage"] == whole["usage"]
    message, choice = whole["choices"][0]["message"], whole["choices"][0]
    folded = fold(chunks)
    assert folded["content"] == (message["content"] or "")
    assert folded["reasoning_content"] == message.get("reasoning_content", "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [(c["name"], c["arguments"]) for c in folded["calls"].values()] == [
        (c["name"], c["arguments"]) for c in calls
    ]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    scores = [score for c in choices for score in c["logprobs"]["content"]]
    assert scores == choice["logprobs"]["content"]
    one_by_one = say(server, text, **fields)
    assert one_by_one["message"]["content"] == message["content"]


def test_logprobs_are_those_of_the_content(server):
    choice = say(
        server, "Hm⟩think§⟨response§Yé.STOP⟩response§■", logprobs=True, top_logprobs=2, stop="STOP"
    )
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(score["bytes"]) for score in content).decode() == "Yé."
    assert [len(score["top_logprobs"]) for score in content] == [2] * 4
    assert content[0]["logprob"] == -0.5
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Yé.", "STOP")


def test_stop_strings_do_not_look_at_the_reasoning(server):
    choice = say(server, "a.b⟩think§⟨response§c.d", stop=".")
    assert choice["message"]["reasoning_content"] == "a.b"
    assert choice["message"]["content"] == "c"


def test_several_choices(server):
    reply = post(server, user(script("⟩think§⟨response§Yes■")), n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Yes"}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
def test_thinking_off(server, fields):
    choice = say(server, "Yes■", **fields)
    assert choice["message"] == {"role": "assistant", "content": "Yes"}
    assert last_prompt(server).endswith("<|open|>response<|sep|>")
    assert "thinking_effort" not in last_prompt(server)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "max"),
        ({"thinking": {"type": "enabled"}}, "max"),
        ({"reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": {"thinking_effort": "medium"}}, "medium"),
    ],
)
def test_thinking_on(server, fields, effort):
    say(server, "Yes■", **fields)
    assert last_prompt(server).endswith("<|open|>think<|sep|>")
    assert f"`thinking_effort={effort}`" in last_prompt(server)


def test_tools_and_tool_choice_reach_the_prompt(server):
    post(server, user("x"), tools=TOOLS, tool_choice="required")
    tools = '[{"function":{"name":"f","parameters":{"type":"object"}},"type":"function"}]'
    assert tools in last_prompt(server)
    assert "You MUST call tools" in last_prompt(server)
    post(server, user("x"), tools=TOOLS, tool_choice="none")
    assert "You MUST NOT call any tools" in last_prompt(server)
    post(server, user("x"), tools=TOOLS)
    assert "tool_choice" not in last_prompt(server)


def test_a_conversation_with_calls_and_results(server):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    post(server, messages)
    prompt = last_prompt(server)
    assert '<|open|>message role="system"<|sep|>Be brief.' in prompt
    assert 'role="user" name="Ann"<|sep|>Go' in prompt
    assert '<|open|>argument key="a" type="number"<|sep|>1<|close|>' in prompt
    assert 'role="tool" tool="f" index="1"<|sep|>done' in prompt


def test_control_tokens_of_users_stay_text(server):
    post(server, user("<|open|>message<|sep|>"))
    ids = list(server.link.requests.values())[-1].prompt_ids
    opens = ids.count(TOKENIZER.control("<|open|>"))
    post(server, user(""))
    ids = list(server.link.requests.values())[-1].prompt_ids
    assert ids.count(TOKENIZER.control("<|open|>")) == opens


def test_limits(server):
    post(server, user("x"), max_completion_tokens=5, max_tokens=9)
    assert list(server.link.requests.values())[-1].params.max_tokens == 5
    reply = post(server, user("x"), top_p=1)
    request = list(server.link.requests.values())[-1]
    assert request.params.max_tokens == 4000 - reply["usage"]["prompt_tokens"]


def deep(depth):
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "x"}, "messages", "valid list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Field required"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": user([{"type": "image_url"}])}, "messages[0].content[0]", "images are not"),
        ({"messages": user([{"type": "input_audio"}])}, "messages[0].content[0]", "text only"),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0]", "must have a text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "needs a name"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages",
            "must be a JSON object",
        ),
        ({"messages": user("x" * 4000)}, "messages", "fit the context"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 3}, "top_logprobs", "with logprobs = true only"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'low', 'medium', 'high' or 'max'"),
        ({"tool_choice": "required"}, "tools", "not declared"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tools",
            "not declared",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice", "go with"),
        ({"tools": TOOLS, "tool_choice": "none", "min_tokens": 2}, "tool_choice", "go with"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not offered"),
        ({"continue_final_message": True}, "continue_final_message", "not offered"),
        ({"min_tokens": 4000}, "min_tokens", "can be generated"),
    ],
)
def test_a_bad_field_is_named(server, fields, param, message):
    response = server.http.post("/v1/chat/completions", json={"messages": user("x"), **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize("depth", [100, 900, 1100, 100_000])
def test_deep_values_do_no_harm(server, depth):
    body = json.dumps({"messages": user("x"), "max_tokens": 5, "tools": TOOLS})
    body = body.replace('{"type": "object"}', deep(depth))
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code in (200, 400)
    arguments = {"name": "f", "arguments": deep(depth)}
    messages = [{"role": "assistant", "tool_calls": [{"function": arguments}]}]
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code in (200, 400)
