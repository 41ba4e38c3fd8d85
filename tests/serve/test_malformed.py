"""Whatever a client sends, the answer is no 5xx, and the next request is served right."""

import copy
import json

import pytest
from fake_engine import script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT = {
    "model": "k3-tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}], "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "auto",
    "reasoning_effort": "low",
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"thinking": True},
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 9,
}
SAMPLING = {
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "ignore_eos": False,
    "min_tokens": 1,
    "max_tokens": 9,
    "response_format": {"type": "text"},
}
COMPLETION = {"model": "k3-tiny", "prompt": ["x"], "echo": True, "logprobs": 1}
RESPONSE = {
    "model": "k3-tiny",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "max_output_tokens": 9,
    "stream": True,
}
BODIES = {
    "/v1/responses": RESPONSE,
    "/v1/completions": {**SAMPLING, **COMPLETION},
    "/v1/chat/completions": {**SAMPLING, **CHAT},
    "/tokenize": {"messages": CHAT["messages"], "tools": CHAT["tools"]},
    "/detokenize": {"tokens": [1, 2, 300]},
}
HOSTILE = [
    "\ud800",
    "\u0000",
    float("nan"),
    float("inf"),
    -0.0,
    1e308,
    2**63,
    -(2**64),
    10**400,
    -1,
    0,
    True,
    None,
    "",
    "<|open|>",
    [],
    {},
    [[]],
    [None],
    {"type": "json_object"},
    {"a": [{}]},
]
anything = st.one_of(
    st.sampled_from(HOSTILE).map(copy.deepcopy),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=4,
    ),
)


def places(value, path=()):
    """Paths of everything inside a JSON value."""
    inside = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def bodies(draw, route):
    """Mostly a good body with one to three places changed, dropped or doubled; else anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.one_of(st.binary(max_size=20), anything.map(json.dumps)))
    body = copy.deepcopy(BODIES[route])
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(list(places(body)) or [("x",)]))
        inside = body
        for step in path:
            inside = inside[step]
        change = draw(st.sampled_from(["set", "set", "set", "drop", "add"]))
        if change == "drop":
            del inside[key]
        elif change == "add" and isinstance(inside, dict):
            inside[draw(st.text(max_size=5))] = draw(anything)
        else:
            inside[key] = draw(anything)
        if not body:
            break
    return json.dumps(body)


@pytest.mark.parametrize("route", list(BODIES))
def test_malformed_requests(server, route):
    @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(route), st.sampled_from(["application/json"] * 9 + ["text/plain", "", "a/b/c"]))
    def check(body, content_type):
        headers = {"Content-Type": content_type}
        response = server.http.post(route, content=body, headers=headers)
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        assert '"error":{' not in response.text or response.status_code != 200
        good = {"prompt": script("right■"), "max_tokens": 9}
        assert server.http.post("/v1/completions", json=good).json()["choices"][0]["text"] == (
            "right"
        )
        assert server.client.open_requests == 0

    check()


@pytest.mark.parametrize("route", list(BODIES))
def test_the_bodies_that_are_changed_are_good(server, route):
    assert server.http.post(route, json=BODIES[route]).status_code == 200
