"""The socket between front and engine, and the client's bookkeeping on it."""

import asyncio
import os

import msgspec
import pytest

from k3jax.request import Delta, Request, SamplingParams
from k3jax.serve.link import (
    Abort,
    Add,
    Deltas,
    EngineEnd,
    FrontEnd,
    Progress,
    Shutdown,
    WorkerSettings,
)


def test_messages_cross_both_ways_in_order(tmp_path):
    address = f"ipc://{tmp_path}/link"
    params = SamplingParams(logit_bias={7: -1.5}, seed=-(2**63), max_tokens=3)
    add = Add(Request(request_id="a", prompt_ids=list(range(100_000)), params=params))
    deltas = Deltas([Delta(request_id="a", token_ids=[1], finish_reason="length")])

    async def cross():
        front = FrontEnd(address)
        settings = WorkerSettings(address=address, parent=os.getppid(), model="x")
        engine = EngineEnd(settings)
        assert await asyncio.to_thread(engine.receive) == []
        for message in (add, Abort("a"), Shutdown(drain=True)):
            front.send(message)
        received = []
        while len(received) < 3:
            received += await asyncio.to_thread(engine.receive, 1.0)
        engine.send(Progress("loads"))
        engine.send(deltas)
        answers = [await front.receive(), await front.receive()]
        engine.close()
        front.close()
        return received, answers

    received, answers = asyncio.run(cross())
    assert received == [add, Abort("a"), Shutdown(drain=True)]
    assert answers == [Progress("loads"), deltas]


def test_a_front_that_is_gone_counts_as_shutdown(tmp_path):
    settings = WorkerSettings(address=f"ipc://{tmp_path}/none", parent=1 << 30, model="x")
    engine = EngineEnd(settings)
    assert engine.receive() == [Shutdown(drain=False)]
    engine.close()


def test_settings_survive_the_command_line():
    settings = WorkerSettings(
        address="ipc:///tmp/x", parent=7, model="/m odel", end_ids=[1, 2], builds=[(1, 8)], tp=4
    )
    text = msgspec.json.encode(settings).decode()
    assert msgspec.json.decode(text, type=WorkerSettings) == settings
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode('{"address": "x", "parent": "y", "model": ""}', type=WorkerSettings)
