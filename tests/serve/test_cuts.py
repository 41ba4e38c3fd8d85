"""A chat's answer is the same however its tokens are cut into deltas, whatever the model says."""

import asyncio

import msgspec
from fake_engine import END, TOKENIZER, ids_of, logprob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat import end_ids
from k3jax.request import Delta
from k3jax.serve import chat
from k3jax.serve.chat_request import ChatRequest
from k3jax.serve.stream import Head

END_IDS = end_ids(TOKENIZER)
TAGS = [
    "think",
    "response",
    "tools",
    'call tool="f" index="1"',
    'argument key="a" type="string"',
    'argument key="b" type="number"',
    "foo",
]
parts = st.one_of(
    st.sampled_from(["⟨", "⟩", "§", "a", "stop", "st", " ", "é", "1"]),
    st.sampled_from(TAGS).map("⟨{}§".format),
    st.sampled_from(["think", "response", "tools", "call", "argument"]).map("⟩{}§".format),
    st.text(max_size=3),
)
streams = st.lists(parts, max_size=25).map(lambda found: ids_of("".join(found)))


def answer(request, ids, cuts, finish):
    """The whole reply, and the tokens counted, of ids that come in so many deltas."""
    choice = chat.ChatChoice(TOKENIZER, request, 0, END_IDS)
    bounds = sorted({*(min(cut, len(ids)) for cut in cuts), len(ids)})
    pieces, begin = [], 0
    for end in bounds:
        last = end == len(ids)
        delta = Delta(
            request_id="r",
            token_ids=ids[begin:end],
            logprobs=[logprob_of(token, 1) for token in ids[begin:end]],
            finish_reason=finish if last else None,
            stop_token=END if last and finish == "stop" else None,
            completion_tokens=end + (last and finish == "stop"),
        )
        begin = end
        piece = choice.push(delta)
        if piece is not None:
            pieces.append(piece)
        if choice.finish_reason is not None:
            break

    async def chunks():
        for piece in pieces:
            yield chat.make_chunk(Head("id", 0, "m"), [piece], None)

    reply = msgspec.to_builtins(asyncio.run(chat.fold(Head("id", 0, "m"), chunks(), 1)))
    for call in reply["choices"][0]["message"].get("tool_calls", ()):
        del call["id"]  # random
    return reply["choices"], choice.tally.completion


@settings(max_examples=150)
@given(
    streams,
    st.lists(st.integers(0, 40), max_size=6),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same_answer(ids, cuts, finish, thinking, once):
    request = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "stop": ["stop"],
            "logprobs": True,
            "top_logprobs": 1,
            "thinking": thinking,
            "parallel_tool_calls": not once,
        }
    )
    letter_by_letter = answer(request, ids, range(len(ids)), finish)
    assert answer(request, ids, cuts, finish) == letter_by_letter
    assert answer(request, ids, [], finish) == letter_by_letter
