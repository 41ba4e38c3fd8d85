"""The real OpenAI client against the server."""

import json

import openai
import pydantic
import pytest
from fake_engine import script

CALL = '⟨call tool="f" index="1"§⟨argument key="a" type="number"§1⟩argument§⟩call§'
ANSWER = f"Hm.⟩think§⟨response§Yés.⟩response§⟨tools§{CALL}⟩tools§⟩message§■"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["k3-tiny"]
    assert client.models.retrieve("k3-tiny").owned_by == "k3jax"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_chat(client):
    reply = client.chat.completions.create(model="k3-tiny", messages=user(script(ANSWER)))
    choice = reply.choices[0]
    assert choice.message.content == "Yés."
    assert choice.message.reasoning_content == "Hm."
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "f"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streamed_chat(client):
    stream = client.chat.completions.create(
        model="k3-tiny",
        messages=user(script(ANSWER)),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Yés."
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_the_clients_own_accumulation_of_a_stream(client):
    with client.chat.completions.stream(model="k3-tiny", messages=user(script(ANSWER))) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Yés."
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


def test_a_response(client):
    reply = client.responses.create(
        model="k3-tiny",
        instructions="Be brief.",
        input=script(ANSWER),
        tools=[{"type": "function", **TOOL}],
    )
    assert reply.output_text == "Yés."
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    assert reply.output[0].content[0].text == "Hm."
    assert json.loads(reply.output[2].arguments) == {"a": 1}
    assert (reply.status, reply.usage.output_tokens_details.reasoning_tokens > 0) == (
        "completed",
        True,
    )
    assert reply.usage.input_tokens_details.cached_tokens == 0
    result = {"type": "function_call_output", "call_id": reply.output[2].call_id, "output": "2"}
    items = [item.model_dump(exclude_none=True) for item in reply.output]
    again = client.responses.create(model="k3-tiny", input=[*items, result])
    assert again.output_text == ""  # it thought "ok" and no more


def test_a_streamed_response(client):
    said = script(ANSWER, cached=5)
    with client.responses.stream(model="k3-tiny", input=said) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == final.output_text == "Yés."
    assert final.output[2].name == "f"
    assert final.usage.input_tokens_details.cached_tokens == 5


def test_a_response_that_is_cut_short(client):
    reply = client.responses.create(model="k3-tiny", input=script("Hm." * 9), max_output_tokens=4)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"conversation": "conv_1"},
        {"previous_response_id": "resp_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"top_logprobs": 2},
    ],
)
def test_a_response_with_what_is_not_offered(client, fields):
    with pytest.raises(openai.BadRequestError, match="is not offered by this server") as raised:
        client.responses.create(model="k3-tiny", input="x", **fields)
    assert [raised.value.param] == list(fields)
    assert raised.value.code == "unsupported_parameter"


def test_parsed_answers(client):
    class Answer(pydantic.BaseModel):
        a: int

    said = script('⟩think§⟨response§{"a": 3}⟩response§⟩message§■')
    reply = client.chat.completions.parse(
        model="k3-tiny", messages=user(said), response_format=Answer
    )
    assert reply.choices[0].message.parsed == Answer(a=3)
    response = client.responses.parse(model="k3-tiny", input=said, text_format=Answer)
    assert response.output_parsed == Answer(a=3)


@pytest.mark.parametrize("streamed", [False, True])
def test_completions(client, streamed):
    reply = client.completions.create(
        model="k3-tiny", prompt=script("one two■"), stop=" ", logprobs=1, stream=streamed
    )
    if streamed:
        assert "".join(chunk.choices[0].text for chunk in reply) == "one"
    else:
        assert reply.choices[0].text == "one"
        assert reply.choices[0].logprobs.tokens == ["o", "n", "e"]


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="k3-tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=user("x"))


def test_an_error_in_a_stream_is_raised(client):
    stream = client.completions.create(
        model="k3-tiny", prompt=script("abc", error="a value is not finite"), stream=True
    )
    with pytest.raises(openai.APIError, match="a value is not finite"):
        list(stream)
