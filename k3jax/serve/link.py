"""Messages between the HTTP front and its engine child, and the two ends of the socket.

The front binds an ipc socket in a directory of its own and passes the address in WorkerSettings,
as the JSON text that is the worker's only argument. Messages are msgspec structs in MessagePack.
"""

from __future__ import annotations

import os

import msgspec
import zmq
import zmq.asyncio

from k3jax.request import Delta, Request, Stats

SEND_SECONDS = 5.0  # that an end waits, when it closes, for its last messages to leave


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine child is told; the fields from `dtype` on are DecodeConfig's.

    None leaves a choice to the engine. `end_ids` are the ids that end an answer.
    """

    address: str
    parent: int  # process id of the front: the child ends when its parent does
    model: str  # directory
    end_ids: list[int] = []
    coordinator: str | None = None  # HOST:PORT of rank 0, where there are several processes
    num_processes: int = 1
    process_id: int = 0
    dtype: str | None = None
    tp: int | None = None
    max_requests: int | None = None
    max_context: int | None = None
    page_size: int | None = None
    cache_memory: int | None = None
    prefix_cache: int | None = None
    decode_backend: str | None = None
    impl: str | None = None
    num_spec: int | None = None
    drafter: str | None = None
    builds: list[tuple[int, int]] | None = None
    step_timeout: float | None = None
    inject_fault: str | None = None
    compile_cache: str | None = None


class Add(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: start a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: nobody waits for this request any more; its slot is free."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: end the process, with `drain` after the open requests."""

    drain: bool = False


class Trace(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: profile the next steps into a directory."""

    steps: int
    directory: str


class Traced(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: a profile is written, or why it is not."""

    error: str | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: a line about loading and compiling."""

    text: str


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine can serve."""

    model: str
    vocab_size: int
    max_context: int  # tokens of one request, prompt and answer
    slots: int  # requests that run at a time
    pages: int
    compilations: int = 0
    guided: bool = False  # follows grammars


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: requests may come."""

    info: ReadyInfo


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: what one step brought, and where the engine stands after it.

    A request that the engine refuses gets one delta with finish_reason "error".
    """

    deltas: list[Delta]
    stats: Stats | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the last message of an engine that cannot go on.

    `kernels`: it may be the fault of the code on the devices.
    """

    text: str
    kernels: bool = False


ToEngine = Add | Abort | Shutdown | Trace
ToFront = Progress | Ready | Deltas | Fatal | Traced

_ENCODER = msgspec.msgpack.Encoder()


class FrontEnd:
    """The front's end: bound, asynchronous; must be made inside a running event loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never block: the engine reads between steps
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(ToFront)

    def send(self, message: ToEngine) -> None:
        """Send without waiting; a message to an engine that is gone is dropped when we close."""
        self._socket.send(_ENCODER.encode(message))

    async def receive(self) -> ToFront:
        """The engine's next message; msgspec.DecodeError if it is none of them."""
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        """Drop what has not left and free the socket."""
        self._context.destroy(linger=0)


class EngineEnd:
    """The worker's end: connected, blocking; for one thread."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._parent = settings.parent
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(settings.address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: ToFront) -> None:
        """Send without waiting."""
        self._socket.send(_ENCODER.encode(message))

    def receive(self, timeout: float = 0.0) -> list[ToEngine]:
        """Every message that has come, waiting up to `timeout` seconds for a first one.

        A front that is gone counts as `Shutdown(drain=False)`: wait in steps of seconds at most.
        """
        messages: list[ToEngine] = []
        wait = int(timeout * 1000)
        while self._socket.poll(wait):
            messages.append(self._decoder.decode(self._socket.recv()))
            wait = 0
        if os.getppid() != self._parent:
            messages.append(Shutdown())
        return messages

    def close(self) -> None:
        """Let the last messages leave, for a bounded time, and free the socket."""
        self._context.destroy(linger=int(SEND_SECONDS * 1000))
