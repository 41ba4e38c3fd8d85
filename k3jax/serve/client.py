"""The front's view of the engine: its state, and the requests that are open in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from k3jax.request import Delta, Request
from k3jax.serve.errors import ApiError, bad_request
from k3jax.serve.link import (
    Abort,
    Add,
    Deltas,
    Fatal,
    Progress,
    Ready,
    ReadyInfo,
    ToEngine,
    ToFront,
)
from k3jax.serve.metrics import Metrics

State = Literal["starting", "ready", "draining", "failed"]

MAX_WAITING = 256  # requests that may wait for a slot; more are told to come again


class Sends(Protocol):
    """What the client needs of a link."""

    def send(self, message: ToEngine) -> None: ...


class EngineClient:
    """Starts requests and hands each what the engine answers it; for one event loop."""

    def __init__(self, link: Sends, metrics: Metrics, *, max_waiting: int = MAX_WAITING) -> None:
        self.state: State = "starting"
        self.failure = ""
        self.progress = "starting"
        self.metrics = metrics
        self._link = link
        self._max_waiting = max_waiting
        self._open: dict[str, Generation] = {}

    @property
    def info(self) -> ReadyInfo | None:
        """What the engine can serve, once it is ready."""
        return self.metrics.info

    @property
    def open_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    def handle(self, message: ToFront) -> None:
        """Act on a message of the engine."""
        match message:
            case Progress(text):
                self.progress = text
            case Ready(info):
                self.metrics.info = info
                if self.state == "starting":
                    self.state = "ready"
            case Deltas(deltas, stats):
                self.metrics.stats = stats or self.metrics.stats
                for delta in deltas:
                    generation = self._open.get(delta.request_id)
                    if generation is not None:  # else: aborted, and this crossed the message
                        generation.put(delta)
            case Fatal(text):
                self.fail(text)

    def ready_info(self) -> ReadyInfo:
        """What the engine can serve; ApiError 503 if it serves nothing now."""
        if self.state != "ready" or self.info is None:
            reason = {"starting": self.progress, "failed": self.failure}.get(self.state, "")
            state = f"the engine is {self.state}" if self.state != "failed" else "the engine failed"
            raise ApiError(503, f"{state}: {reason}".removesuffix(": "), code=self.state)
        return self.info

    def check_room(self, count: int) -> None:
        """ApiError if `count` more requests cannot be taken: 503 if not ready, 429 if too many
        wait, 400 if there are never so many places.
        """
        room = self.ready_info().slots + self._max_waiting
        if count > room:
            raise bad_request(f"{count} answers are asked for, but at most {room} at a time")
        if len(self._open) + count > room:
            raise ApiError(
                429, f"{len(self._open)} requests are open, of {room}: come again later",
                code="overloaded",
            )  # fmt: skip

    def start(self, requests: Sequence[Request]) -> Generation:
        """Send requests to the engine; ApiError if `check_room` raises one."""
        self.check_room(len(requests))
        generation = Generation(self, requests)
        for request in requests:
            self._open[request.request_id] = generation
            self._link.send(Add(request))
        return generation

    def drain(self) -> None:
        """Take no new requests."""
        if self.state != "failed":
            self.state = "draining"

    def fail(self, reason: str) -> None:
        """The engine is gone: end every open request with an error."""
        if self.state == "failed":
            return
        self.state, self.failure, self.metrics.failed = "failed", reason, True
        self._end_open(ApiError(500, f"the engine failed: {reason}", code="failed"))

    def end_open(self, reason: str) -> None:
        """Nobody waits any longer: end every open request with an error."""
        self._end_open(ApiError(503, reason, code=self.state))

    def _end_open(self, error: ApiError) -> None:
        for generation in set(self._open.values()):
            generation.put(error)

    def forget(self, request_id: str, *, abort: bool) -> None:
        """A request is over; with `abort` the engine does not know yet."""
        if self._open.pop(request_id, None) is not None and abort and self.state != "failed":
            self._link.send(Abort(request_id))


class Generation:
    """The answers to the requests of one HTTP request, as they come.

    Whoever starts one must `close` it, which aborts what is still open.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._started = time.perf_counter()
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._ids = [request.request_id for request in requests]
        self._first: dict[int, float] = {}
        self._queue: asyncio.Queue[Delta | ApiError] = asyncio.Queue()

    def put(self, delta: Delta | ApiError) -> None:
        """A delta came, or an error that ends it all."""
        if not isinstance(delta, ApiError):
            self._measure(self._index[delta.request_id], delta)
        self._queue.put_nowait(delta)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the request, delta) until every request is over; ApiError if one fails."""
        while self._index:
            delta = await self._queue.get()
            if isinstance(delta, ApiError):
                raise delta
            index = self._index.get(delta.request_id)
            if index is None:
                continue
            if delta.finish_reason is not None:
                self._end(index, abort=False)
            if delta.finish_reason in ("error", "abort"):
                raise ApiError(500, delta.error or "the engine ended the request", code="failed")
            yield index, delta

    def stop(self, index: int) -> None:
        """Enough of a request: abort it."""
        self._end(index, abort=True)

    def close(self) -> None:
        """Abort whatever is still open."""
        for index in list(self._index.values()):
            self.stop(index)

    def _end(self, index: int, *, abort: bool) -> None:
        request_id = self._ids[index]
        if self._index.pop(request_id, None) is not None:
            self._client.forget(request_id, abort=abort)

    def _measure(self, index: int, delta: Delta) -> None:
        """Count a delta's tokens and the times of the first and the last."""
        if delta.finish_reason in ("error", "abort"):
            return
        now = time.perf_counter()
        first = index not in self._first
        if first:
            self._first[index] = now
            self._client.metrics.observe_first(now - self._started)
        self._client.metrics.count(delta, first)
        if delta.finish_reason is not None:
            seconds = now - self._first[index]
            self._client.metrics.observe_last(seconds, delta.completion_tokens)
