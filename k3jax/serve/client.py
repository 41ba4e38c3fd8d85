"""The front's view of the engine: its state, and the requests that are open in it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from k3jax.request import Delta, Request
from k3jax.serve.errors import ApiError, bad_request
from k3jax.serve.limits import Limits
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
    Trace,
    Traced,
)
from k3jax.serve.metrics import Metrics
from k3jax.serve.restarts import Death

State = Literal["starting", "ready", "draining", "failed"]
NO_LIMITS = Limits()
TRACE_SECONDS = 60.0  # for the steps of a profile to run


class Sends(Protocol):
    """What the client needs of a link."""

    def send(self, message: ToEngine) -> None: ...


class EngineClient:
    """Starts requests and hands each what the engine answers it; for one event loop."""

    def __init__(
        self, link: Sends, metrics: Metrics, limits: Limits = NO_LIMITS, *, lives: int = 0
    ) -> None:
        """`lives` is how often an open request goes on in another engine when its own fails."""
        self.state: State = "starting"
        self.death: Death | None = None  # of the engine that failed, if it did
        self.notice = ""  # what an operator should know of the engine that took its place
        self.progress = "starting"
        self.metrics = metrics
        self._link = link
        self._max_waiting = limits.max_waiting
        self._request_seconds = limits.request_seconds
        self._lives = lives
        self._open: dict[str, Generation] = {}
        self._tracing: asyncio.Future[str | None] | None = None

    @property
    def info(self) -> ReadyInfo | None:
        """What the engine can serve, once it is ready."""
        return self.metrics.info

    @property
    def failure(self) -> str:
        """Why the engine failed, if it did."""
        return "" if self.death is None else self.death.reason

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
                for name, begun in self._open.items():  # in an engine that failed
                    self._link.send(Add(begun.rest_of(name)))
            case Deltas(deltas, stats):
                self.metrics.stats = stats or self.metrics.stats
                for delta in deltas:
                    generation = self._open.get(delta.request_id)
                    if generation is not None:  # else: aborted, and this crossed the message
                        generation.put(delta)
            case Traced(error):
                self._end_trace(error)
            case Fatal(text, kernels):
                self.fail(Death(text, kernels))

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
        if self._lives:
            requests = [with_seed(request) for request in requests]
        generation = Generation(self, requests, self._request_seconds, self._lives)
        for request in requests:
            self._open[request.request_id] = generation
            self._link.send(Add(request))
        return generation

    async def trace(self, steps: int, directory: str) -> None:
        """Profile the engine's next steps; ApiError if that cannot be done, or no steps come."""
        self.ready_info()
        if self._tracing is not None:
            raise ApiError(409, "a profile is being taken", code="busy")
        self._tracing = asyncio.get_running_loop().create_future()
        self._link.send(Trace(steps, directory))
        try:
            async with asyncio.timeout(TRACE_SECONDS):
                error = await self._tracing
        except TimeoutError as late:
            reason = f"{steps} steps did not come within {TRACE_SECONDS:g} s; the profile waits"
            raise ApiError(408, reason, code="timeout") from late
        finally:
            self._tracing = None
        if error is not None:
            raise ApiError(500, f"no profile: {error}")

    def _end_trace(self, error: str | None) -> None:
        if self._tracing is not None and not self._tracing.done():
            self._tracing.set_result(error)

    def drain(self) -> None:
        """Take no new requests."""
        if self.state != "failed":
            self.state = "draining"

    def fail(self, death: Death) -> None:
        """The engine is gone: end every open request that has no further life with an error."""
        if self.state == "failed":
            return
        lasting = self.state == "ready"  # one that never got ready has no follower
        self.state, self.death, self.metrics.failed = "failed", death, True
        for generation in set(self._open.values()):
            generation.lives -= 1
            if not lasting or generation.lives < 0:
                generation.put(self._failed())
        self._end_trace(f"the engine failed: {death.reason}")

    def give_up(self) -> None:
        """No other engine takes the place of one that failed."""
        self._end_open(self._failed())

    def _failed(self) -> ApiError:
        return ApiError(500, f"the engine failed: {self.failure}", code="failed")

    def restart(self, link: Sends) -> None:
        """Another engine takes the place of one that failed, and is not ready yet."""
        self._link = link
        kernels = self.death is not None and self.death.kernels
        if kernels:
            self.notice = f"the engine runs on the stock path since one failed: {self.failure}"
        self.state, self.death, self.progress = "starting", None, "restarting"
        self.metrics.restart(kernels)

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


def with_seed(request: Request) -> Request:
    """A request whose noise is the same in every engine."""
    if request.params.seed is not None:
        return request
    params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, params=params)


class Generation:
    """The answers to the requests of one HTTP request, as they come.

    Whoever starts one must `close` it, which aborts what is still open.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[Request],
        seconds: float | None,
        lives: int,
    ) -> None:
        self.lives = lives
        self._client = client
        self._requests = {request.request_id: request for request in requests}
        self._said: dict[str, list[int]] = {name: [] for name in self._requests}
        self._seconds = seconds
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._started = time.perf_counter()
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._ids = [request.request_id for request in requests]
        self._first: dict[int, float] = {}
        self._queue: asyncio.Queue[Delta | ApiError] = asyncio.Queue()

    def put(self, delta: Delta | ApiError) -> None:
        """A delta came, or an error that ends it all."""
        if not isinstance(delta, ApiError):
            self._measure(self._index[delta.request_id], delta)
            self._said[delta.request_id] += delta.token_ids
        self._queue.put_nowait(delta)

    def rest_of(self, request_id: str) -> Request:
        """What another engine has to do of a request: to go on after what was said."""
        request, said = self._requests[request_id], self._said[request_id]
        return msgspec.structs.replace(request, generated=list(said))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the request, delta) until every request is over; ApiError if one fails."""
        while self._index:
            try:
                async with asyncio.timeout_at(self._deadline):
                    delta = await self._queue.get()
            except TimeoutError as error:
                reason = f"the answer was not whole within {self._seconds:g} s"
                raise ApiError(408, reason, code="timeout") from error
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
