"""The front process: binds the port, starts the engine child, serves until one of them ends.

The child may load for minutes or die at any time; the front is there all along and says so. It may
start another child then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from k3jax.chat import end_ids
from k3jax.serve.app import create_app
from k3jax.serve.client import EngineClient
from k3jax.serve.http import HttpServer, http_server
from k3jax.serve.limits import Limits
from k3jax.serve.link import FrontEnd, Progress, Ready, Shutdown, WorkerSettings
from k3jax.serve.log import Log
from k3jax.serve.metrics import Metrics
from k3jax.serve.restarts import Death, Restarts, death_of
from k3jax.serve.served import Served
from k3jax.tokenizer import Tokenizer

WORKER = (sys.executable, "-m", "k3jax.serve.worker")
LIVES = 2  # engines that one request may outlive: it might be what they die of
FAILURE_SECONDS = 1.0  # after the engine died, for open requests and probes to hear of it
DRAIN_POLL_SECONDS = 0.05  # between two looks at what is still open
STOP_SECONDS = 10.0  # for the engine to end when told, before it is killed


@dataclass(frozen=True)
class EngineChild:
    """One engine process, and the front's end of the link to it."""

    process: asyncio.subprocess.Process
    link: FrontEnd

    async def watch(self, client: EngineClient) -> None:
        """The engine should not end before the front."""
        status = await self.process.wait()
        await asyncio.sleep(0.1)  # its last message says more than its status
        client.fail(death_of(status))

    async def stop(self, *, ask: bool) -> None:
        """End it, at first by asking for it; kill it if that takes too long."""
        if self.process.returncode is None and ask:
            self.link.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        if self.process.returncode is None:  # it still loads, or hangs; there is nothing to save
            self.process.kill()
            await self.process.wait()
        self.link.close()


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
    restarts: bool = False  # an engine that was ready and failed is followed by another
    limits: Limits = field(default_factory=Limits)


class Front:
    """One run of the server, from binding the port to the exit status.

    Making one raises ValueError or OSError if the tokenizer or the address is wrong.
    """

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._log = Log(settings.limits.log)
        self._tokenizer = Tokenizer.from_directory(settings.model)
        self._listener = _listen(settings.host, settings.port)
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()
        self._started = 0  # engines
        self._worker, self._restarts = settings.worker, Restarts()  # of the next engine

    async def run(self) -> int:
        """Serve; 0 after SIGTERM or SIGINT, 1 if the engine failed."""
        # A socket's path has some hundred characters at most, which a TMPDIR may take up alone.
        short = len(tempfile.gettempdir()) < 64
        with tempfile.TemporaryDirectory(prefix="k3jax-", dir=None if short else "/tmp") as folder:
            self._folder = folder
            self._child = await self._start_engine()
            metrics = Metrics(self._settings.worker.tp or 1)
            metrics.engine = self._child.process.pid
            lives = LIVES if self._settings.restarts else 0
            client = EngineClient(self._child.link, metrics, self._settings.limits, lives=lives)
            try:
                return await self._serve(client)
            finally:
                await self._child.stop(ask=client.info is not None)

    async def _start_engine(self) -> EngineChild:
        self._started += 1
        address = f"ipc://{self._folder}/engine{self._started}"
        link = FrontEnd(address)
        worker = msgspec.structs.replace(
            self._worker,
            address=address,
            parent=os.getpid(),
            end_ids=end_ids(self._tokenizer),
        )
        process = await asyncio.create_subprocess_exec(
            *self._settings.worker_command,
            msgspec.json.encode(worker).decode(),
            start_new_session=True,  # a Ctrl-C in the terminal is for the front alone
        )
        return EngineChild(process, link)

    async def _serve(self, client: EngineClient) -> int:
        served = Served(self._settings.served_name, self._tokenizer, client)
        limits = self._settings.limits
        server = http_server(
            create_app(served, limits, self._log),
            drain_seconds=1 + math.ceil(self._settings.drain_seconds),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        loop.run_in_executor(None, settle, served)
        tasks: set[asyncio.Task[object]] = {
            asyncio.create_task(self._keep_engine(client)),
            asyncio.create_task(self._stopping.wait()),
        }
        try:
            await asyncio.wait({http, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if client.state == "failed":
                await asyncio.sleep(FAILURE_SECONDS)
            elif self._stopping.is_set():
                self._log.say(f"stopping: {client.open_requests} open requests may end")
                client.drain()
            await self._drain(server, http, client)
        finally:
            await cancel_all(tasks)
        raise_failure(tasks)
        if client.state == "failed":
            self._log.say(f"the engine failed: {client.failure}")
        return 0 if self._stopping.is_set() and client.state != "failed" else 1

    async def _drain(
        self, server: HttpServer, http: asyncio.Task[None], client: EngineClient
    ) -> None:
        """Wait for the open requests, up to `drain_seconds` or a second signal; end the others.

        Meanwhile connections are taken, so that new requests and probes hear what is going on.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_seconds
        either = {http, asyncio.create_task(self._hurry.wait())}

        async def wait(seconds: float) -> bool:
            """Whether there is time left, and reason to wait."""
            left = deadline - loop.time()
            ended, _ = await asyncio.wait(
                either, timeout=max(0.0, min(seconds, left)), return_when=asyncio.FIRST_COMPLETED
            )
            return not ended and left > 0

        while client.open_requests and await wait(DRAIN_POLL_SECONDS):
            pass
        server.should_exit = True
        await wait(math.inf)
        await cancel_all(either - {http})
        client.end_open("the server shut down before the end of the answer")
        await asyncio.wait({http}, timeout=FAILURE_SECONDS)
        server.force_exit = True
        await http

    async def _keep_engine(self, client: EngineClient) -> None:
        """Follow the engine until it fails; where it may, another takes its place.

        An engine that never got ready would fail again.
        """
        while True:
            tasks = {
                asyncio.create_task(self._receive(client)),
                asyncio.create_task(self._child.watch(client)),
            }
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all(tasks)
            raise_failure(tasks)
            if not self._may_restart(client):
                client.give_up()
                return
            await asyncio.sleep(FAILURE_SECONDS)
            await self._child.stop(ask=False)
            self._child = await self._start_engine()
            client.metrics.engine = self._child.process.pid
            client.restart(self._child.link)

    def _may_restart(self, client: EngineClient) -> bool:
        """Whether another engine follows the one that failed; the log says which, or why none."""
        if not self._settings.restarts or client.info is None or self._stopping.is_set():
            return False
        death = client.death or Death("")
        try:
            self._worker = self._restarts.next(self._worker, death, time.monotonic())
        except RuntimeError as error:
            self._log.say(f"no other engine starts: {error}")
            return False
        path = " on the stock path (--decode-backend stock)" if death.kernels else ""
        self._log.say(f"the engine failed: {death.reason}; another one starts{path}")
        return True

    async def _receive(self, client: EngineClient) -> None:
        """Act on the engine's messages until it fails."""
        while client.state != "failed":
            try:
                message = await self._child.link.receive()
            except msgspec.DecodeError as error:
                client.fail(Death(f"a message that cannot be read: {error}"))
                return
            client.handle(message)
            if isinstance(message, Progress):
                self._log.say(message.text)
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


def settle(served: Served) -> None:
    """Read the vocabulary for grammars now, while nobody waits for a token.

    What is there then stays, so no collection of garbage need walk it while tokens are awaited.
    """
    _ = served.guides
    gc.collect()
    gc.freeze()


def _listen(host: str, port: int) -> socket.socket:
    """Bind now, so that health and progress can be asked while the model loads."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def raise_failure(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Raise what an ended task died of, if one did not end by being cancelled."""
    for task in tasks:
        if not task.cancelled():
            task.result()
