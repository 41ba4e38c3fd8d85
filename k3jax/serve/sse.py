"""Replies over HTTP that end when the client goes: event streams and whole replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from k3jax.serve.client import Generation
from k3jax.serve.errors import ApiError

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0  # without an event, so that nobody between takes the line for dead


class EventStream(StreamingResponse):
    """Server-sent events of a generation; a client that goes aborts it at once."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, content: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self._generation = generation
        self._last_event = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._respond(send), receive)
        finally:
            self._generation.close()

    async def _respond(self, send: Send) -> None:
        async def timed(message: Message) -> None:
            self._last_event = time.monotonic()
            await send(message)

        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            await self.stream_response(timed)
        finally:
            keeper.cancel()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment, which clients skip, whenever nothing was said for a while."""
        comment = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
        while True:
            silent = time.monotonic() - self._last_event
            if silent >= KEEP_ALIVE_SECONDS:
                self._last_event = time.monotonic()
                await send(comment)
            else:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silent)


async def events(chunks: AsyncIterator[msgspec.Struct]) -> AsyncIterator[bytes]:
    """One event a chunk, then [DONE]; after an error its object, and nothing more."""
    try:
        async for chunk in chunks:
            yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    except ApiError as error:
        yield b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
        return
    yield b"data: [DONE]\n\n"


async def named_events(answer: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Events named by their own `type`; after an error, which is one too, nothing more."""
    number = 0
    try:
        async for event in answer:
            number = event["sequence_number"] + 1
            yield _named(event)
    except ApiError as error:
        body = error.body()["error"]
        yield _named({**body, "type": "error", "sequence_number": number})


def _named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Do some work for a client; None, and the work is cancelled, if the client goes."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
