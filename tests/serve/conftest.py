"""A real HTTP server, in a thread, in front of the fake engine."""

import asyncio
import threading
import time

import httpx
import pytest
import uvicorn
from fake_engine import TOKENIZER, FakeLink

from k3jax.serve.app import Served, create_app
from k3jax.serve.client import EngineClient
from k3jax.serve.metrics import Metrics


class Server:
    """An app on a port of its own; `link` is its engine, `client` its view of it."""

    def __init__(self, *, ready=True, max_waiting=64):
        self.link = FakeLink()
        self.client = EngineClient(self.link, Metrics(), max_waiting=max_waiting)
        app = create_app(Served("k3-tiny", TOKENIZER, self.client))
        config = uvicorn.Config(
            app, port=0, log_level="warning", lifespan="off", ws="none", loop="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    async def _serve(self, ready):
        self.loop = asyncio.get_running_loop()
        if ready:
            self.link.start(self.client)
        await self._server.serve()

    def call(self, function, *arguments):
        """Run a function in the server's event loop."""

        async def run():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(5)

    def close(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def make_server():
    """Servers in other states; closed after the test."""
    servers = []

    def make(**options):
        servers.append(Server(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
