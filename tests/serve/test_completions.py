"""/v1/completions over real HTTP: texts, ends, log probabilities, echo, parameters."""

import json

import pytest
from fake_engine import TOKENIZER, ids_of, script
from hypothesis import given, settings
from hypothesis import strategies as st


def post(server, prompt, **fields):
    response = server.http.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 100, **fields}
    )
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, prompt, **fields):
    """The chunks of a streamed completion."""
    body = {"prompt": prompt, "max_tokens": 100, "stream": True, **fields}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def last_params(server):
    return list(server.link.requests.values())[-1].params


def test_a_text_and_its_usage(server):
    reply = post(server, script("héllo■", cached=7))
    assert reply["choices"] == [
        {"index": 0, "text": "héllo", "logprobs": None, "finish_reason": "stop"}
    ]
    assert reply["usage"]["completion_tokens"] == 7  # é is two tokens, and the stop token
    assert reply["usage"]["prompt_tokens"] == len(script("héllo■", cached=7))
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert (reply["object"], reply["model"]) == ("text_completion", "k3-tiny")


def test_tokens_after_the_first_of_a_step_were_drafts(server):
    usage = post(server, script("abcdefg■", group=3))["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 4


@settings(max_examples=40)
@given(
    st.text(alphabet="ab é■§", max_size=12),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=2),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_the_stream_says_what_the_reply_says(server, text, stops, group, least):
    fields = {"stop": stops, "logprobs": 1, "echo": True, "min_tokens": least}
    prompt = script(text, group=group)
    whole = post(server, prompt, **fields)
    chunks = stream(server, prompt, stream_options={"include_usage": True}, **fields)
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    choice = whole["choices"][0]
    assert "".join(part["text"] for part in choices) == choice["text"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert all(part["finish_reason"] is None for part in choices[:-1])
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [entry for part in choices for entry in part["logprobs"][key]]
        assert streamed == choice["logprobs"][key]
    ungrouped = post(server, script(text, group=1), **{**fields, "echo": False})
    assert choice["text"] == prompt + ungrouped["choices"][0]["text"]


def test_a_stop_string_ends_the_text_and_the_request(server):
    before = len(server.link.aborted)
    reply = post(server, script("one STOP two", delay=0.001), stop=["STOP", "never"])
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "STOP"
    assert reply["usage"]["completion_tokens"] == 8
    assert len(server.link.aborted) == before + 1


def test_half_a_stop_string_is_shown_when_nothing_follows(server):
    reply = post(server, script("one STO■"), stop="STOP")
    assert reply["choices"][0]["text"] == "one STO"
    chunks = stream(server, script("one STOP■"), stop="STOP")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "


def test_stop_strings_wait_for_the_least_number_of_tokens(server):
    reply = post(server, script("a.b.c.■"), stop=".", min_tokens=3)
    assert reply["choices"][0]["text"] == "a.b"


def test_ends(server):
    assert post(server, script("abc■"), max_tokens=2)["choices"][0]["finish_reason"] == "length"
    reply = post(server, script("abc■"), stop_token_ids=[99])
    assert reply["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 99,
    }
    ignored = post(server, script("ab■c"), ignore_eos=True, max_tokens=6)["choices"][0]
    assert (ignored["text"], ignored["finish_reason"]) == ("abcxx", "length")
    shown = post(server, script("ab■c"), ignore_eos=True, max_tokens=4, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "ab<|end_of_msg|>c"


def test_half_a_character_at_the_end_is_replaced(server):
    assert post(server, script("né"), max_tokens=2)["choices"][0]["text"] == "n\ufffd"


def test_several_prompts_and_choices(server):
    prompts = [script("one■"), script("two■", cached=5)]
    reply = post(server, prompts, n=2, seed=7)
    texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert texts == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply["usage"]["completion_tokens"] == 16
    seeds = [request.params.seed for request in server.link.requests.values()]
    assert seeds[-4:] == [7, 8, 7, 8]
    chunks = stream(server, prompts, n=2)
    for index, text in texts:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == text


@pytest.mark.parametrize("many", [False, True])
def test_prompts_of_ids(server, many):
    ids = TOKENIZER.encode(script("yes■"))
    assert post(server, [ids] if many else ids)["choices"][0]["text"] == "yes"


def test_an_empty_prompt_is_the_beginning_of_a_text(server):
    assert post(server, "")["usage"]["prompt_tokens"] == 1
    assert list(server.link.requests.values())[-1].prompt_ids == [TOKENIZER.bos_id]


def test_logprobs(server):
    logprobs = post(server, script("é!■"), logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|end_of_msg|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 4  # as many as the usage counts
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert logprobs["top_logprobs"][2] == {"!": -0.5, '"': -1.5}
    without = post(server, script("é!■"), logprobs=0)["choices"][0]["logprobs"]
    assert without["top_logprobs"] is None
    cut = post(server, script("abSTOP■"), logprobs=0, stop="STOP")["choices"][0]["logprobs"]
    assert cut["tokens"] == ["a", "b"]


def test_echo_with_prompt_logprobs(server):
    prompt = script("x■")
    choice = post(server, prompt, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == prompt + "x"
    assert choice["logprobs"]["tokens"] == [*prompt, "x", "<|end_of_msg|>"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(prompt) + 1)
    assert choice["logprobs"]["text_offset"] == list(range(len(prompt) + 2))
    assert choice["logprobs"]["top_logprobs"][0] is None
    only = post(server, prompt, echo=True, logprobs=1, max_tokens=0)
    assert only["choices"][0]["text"] == prompt
    assert len(only["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("say", ["x■", "■"])
def test_one_token_after_each_scored_prompt(server, say):
    """What lm-eval's local-completions asks: a batch of ids; it drops the last entry of each.

    So there is always one, also where the token after the prompt ends the text.
    """
    prompts = [TOKENIZER.encode(script(say)), TOKENIZER.encode("longer " + script(say))]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    for prompt, choice in zip(prompts, post(server, prompts, **fields)["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None] + [-0.5] * len(prompt)
        names = [TOKENIZER.token_bytes(token).decode() for token in prompt]
        assert logprobs["tokens"][:-1] == names
        tops = logprobs["top_logprobs"]
        assert tops == [None, *({name: -0.5} for name in logprobs["tokens"][1:])]


def test_prompt_logprobs_in_their_own_field(server):
    fields = {"max_tokens": 2, "prompt_logprobs": 2}
    choice = post(server, "héy", **fields)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(TOKENIZER.encode("héy")) - 1
    y = TOKENIZER.encode("y")[0]
    assert others[-1] == {
        str(y): {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        str(y + 1): {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.decode([y + 1])},
    }
    assert choice["logprobs"] is None
    alone = post(server, "héy", **{**fields, "prompt_logprobs": 0})["choices"][0]
    assert alone["prompt_logprobs"][-1][str(y)]["rank"] is None
    both = post(server, "héy", **fields, echo=True, logprobs=1)["choices"][0]
    assert both["prompt_logprobs"] == choice["prompt_logprobs"]
    assert [len(top) for top in both["logprobs"]["top_logprobs"][1:]] == [1] * (len(others) + 2)
    body = {"prompt": "héy", **fields, "stream": True}
    events = server.http.post("/v1/completions", json=body).text.split("\n\n")
    scored = [event for event in events if "prompt_logprobs" in event]
    assert scored == events[:1]


def test_echo_shows_no_control_tokens(server):
    ids = ids_of("⟨a§") + TOKENIZER.encode(script("x■"))
    assert post(server, ids, echo=True)["choices"][0]["text"] == "a" + script("x■") + "x"


def test_parameters_reach_the_engine(server):
    post(
        server,
        "x",
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        seed=-(2**63),
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "6": 2},
        stop_token_ids=[9, 8, 9],
        min_tokens=2,
        max_tokens=5,
    )
    params = last_params(server)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.125)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.25, {5: -100.0, 6: 2.0})
    assert (params.seed, params.stop_token_ids) == (-(2**63), [8, 9])
    assert (params.min_tokens, params.max_tokens) == (2, 5)
    assert (params.logprobs, params.prompt_logprobs, params.ignore_eos) == (None, None, False)


def test_defaults(server):
    response = server.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 200
    params = last_params(server)
    assert (params.temperature, params.top_p, params.seed) == (1.0, 0.95, None)
    assert params.max_tokens == 16
    server.http.post("/v1/completions", json={"prompt": "x" * 3995})
    assert last_params(server).max_tokens == 5  # the default yields to the context


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": "1"}, "n", "valid integer"),
        ({"n": True}, "n", "valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stop": ["a", 1]}, "stop[1]", "valid string"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias", "token id 512 is not in [0, 512)"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({"stop_token_ids": [512]}, "stop_token_ids", "token id 512"),
        ({"prompt": [1, 512]}, "prompt", "token id 512"),
        ({"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1 item"),
        ({"prompt": None}, "prompt", "valid string"),
        ({"prompt": "x" * 4000}, "prompt", "the prompt has 4000 tokens; 1 to 3999 fit"),
        ({"max_tokens": 4000}, "prompt", "only 3999 fit the context of 4000"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, or 0 with echo"),
        ({"min_tokens": 200}, "min_tokens", "above the limit of 100"),
        ({"stream_options": {}}, "stream_options", "with stream = true only"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"best_of": 3}, "best_of", "best_of other than n is not offered"),
        ({"suffix": "x"}, "suffix", "not offered"),
        ({"functions": [{}]}, "functions", "not offered"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "not offered"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not offered"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ],
)
def test_a_bad_field_is_named(server, fields, param, message):
    body = {"prompt": "x", "max_tokens": 100, **fields}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"), [("", "body is empty"), ("{", "is not JSON"), ("[]", "valid dictionary")]
)
def test_a_body_that_is_no_object_is_named(server, body, message):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_unknown_fields_are_ignored(server):
    reply = post(server, "x", user="me", unheard_of={"a": 1}, guided_json=None)
    assert reply["choices"][0]["text"] == "ok"


def test_an_unknown_model_is_404(server):
    body = json.dumps({"prompt": "x", "model": "gpt-4\ud800"})
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
