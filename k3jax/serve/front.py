"""The front process: binds the port, starts the engine child, serves until one of them ends.

The child may load for minutes or die at any time; the front is there all along and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn

from k3jax.chat import end_ids
from k3jax.serve.app import Served, create_app
from k3jax.serve.client import EngineClient
from k3jax.serve.link import FrontEnd, Progress, Ready, Shutdown, WorkerSettings
from k3jax.serve.metrics import Metrics
from k3jax.tokenizer import Tokenizer

WORKER = (sys.executable, "-m", "k3jax.serve.worker")
IDLE_CONNECTION_SECONDS = 300  # a client's pool may keep a connection so long between requests
FAILURE_SECONDS = 1.0  # after the engine died, for open requests and probes to hear of it
STOP_SECONDS = 10.0  # for the engine to end when told, before it is killed


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """What the front itself needs; `worker` goes to the engine child."""

    model: Path
    served_name: str
    host: str
    port: int
    drain_seconds: float
    worker: WorkerSettings
    worker_command: Sequence[str] = WORKER


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves the signals to the front."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """One run of the server, from binding the port to the exit status.

    Making one raises ValueError or OSError if the tokenizer or the address is wrong.
    """

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer.from_directory(settings.model)
        self._listener = _listen(settings.host, settings.port)
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        """Serve; 0 after SIGTERM or SIGINT, 1 if the engine failed."""
        # A socket's path has some hundred characters at most, which a TMPDIR may take up alone.
        short = len(tempfile.gettempdir()) < 64
        with tempfile.TemporaryDirectory(prefix="k3jax-", dir=None if short else "/tmp") as folder:
            address = f"ipc://{folder}/engine"
            link = FrontEnd(address)
            client = EngineClient(link, Metrics())
            engine = await self._start_engine(address)
            try:
                return await self._serve(link, client, engine)
            finally:
                await _stop_engine(engine, link, client)
                link.close()

    async def _start_engine(self, address: str) -> asyncio.subprocess.Process:
        worker = msgspec.structs.replace(
            self._settings.worker,
            address=address,
            parent=os.getpid(),
            end_ids=end_ids(self._tokenizer),
        )
        return await asyncio.create_subprocess_exec(
            *self._settings.worker_command,
            msgspec.json.encode(worker).decode(),
            start_new_session=True,  # a Ctrl-C in the terminal is for the front alone
        )

    async def _serve(
        self, link: FrontEnd, client: EngineClient, engine: asyncio.subprocess.Process
    ) -> int:
        served = Served(self._settings.served_name, self._tokenizer, client)
        server = HttpServer(
            uvicorn.Config(
                create_app(served),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=IDLE_CONNECTION_SECONDS,
                timeout_graceful_shutdown=1 + math.ceil(self._settings.drain_seconds),
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        tasks: set[asyncio.Task[object]] = {
            asyncio.create_task(self._receive(link, client)),
            asyncio.create_task(_watch(engine, client)),
            asyncio.create_task(self._stopping.wait()),
        }
        try:
            await asyncio.wait({http, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if client.state == "failed":
                await asyncio.sleep(FAILURE_SECONDS)
            elif self._stopping.is_set():
                _say(f"stopping: {client.open_requests} open requests may end")
                client.drain()
            server.should_exit = True
            await self._drain(http, client)
            server.force_exit = True
            await http
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()  # raises what it died of
        if client.state == "failed":
            _say(f"the engine failed: {client.failure}")
        return 0 if self._stopping.is_set() and client.state != "failed" else 1

    async def _drain(self, http: asyncio.Task[None], client: EngineClient) -> None:
        """Wait for the open requests, up to `drain_seconds` or a second signal; end the others."""
        hurry = asyncio.create_task(self._hurry.wait())
        seconds = self._settings.drain_seconds
        await asyncio.wait({http, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        client.end_open("the server shut down before the end of the answer")
        await asyncio.wait({http}, timeout=FAILURE_SECONDS)

    async def _receive(self, link: FrontEnd, client: EngineClient) -> None:
        """Act on the engine's messages until it fails."""
        while client.state != "failed":
            try:
                message = await link.receive()
            except msgspec.DecodeError as error:
                client.fail(f"a message that cannot be read: {error}")
                return
            client.handle(message)
            if isinstance(message, Progress):
                _say(message.text)
            elif isinstance(message, Ready):
                self._announce(client)

    def _announce(self, client: EngineClient) -> None:
        info = client.ready_info() if client.state == "ready" else None
        if info is None:
            return
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        name = self._settings.served_name
        print(
            f"k3jax serves {name} at http://{host}:{port}/v1 ({info.slots} requests at a time, "
            f"{info.max_context} tokens each). Try:\n"
            f"  curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' "
            f"""-d '{{"max_tokens": 32, "messages": [{{"role": "user", "content": "Hi"}}]}}'""",
            flush=True,
        )

    def _on_signal(self) -> None:
        """First stop after the open requests; a second signal does not wait for them."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()


def _listen(host: str, port: int) -> socket.socket:
    """Bind now, so that health and progress can be asked while the model loads."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def _watch(engine: asyncio.subprocess.Process, client: EngineClient) -> None:
    """The engine should not end before the front."""
    status = await engine.wait()
    await asyncio.sleep(0.1)  # its last message says more than its status
    how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    client.fail(f"the engine process ended {how}")


async def _stop_engine(
    engine: asyncio.subprocess.Process, link: FrontEnd, client: EngineClient
) -> None:
    """Ask the engine to end; kill it if it does not in time."""
    if engine.returncode is None and client.info is not None:
        link.send(Shutdown())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(engine.wait(), STOP_SECONDS)
    if engine.returncode is None:  # it still loads, or hangs; there is nothing to save
        engine.kill()
        await engine.wait()


def _say(text: str) -> None:
    print(f"k3jax: {text}", file=sys.stderr, flush=True)
