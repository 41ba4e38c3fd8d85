"""The real OpenAI client against the server."""

import json

import openai
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
