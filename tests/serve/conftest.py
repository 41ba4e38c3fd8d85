"""A real HTTP server, in a thread, in front of the fake engine."""

import asyncio
import io
import threading
import time

import httpx
import pytest
from fake_engine import TOKENIZER, FakeLink

from k3jax.serve.app import create_app
from k3jax.serve.client import EngineClient
from k3jax.serve.http import http_server
from k3jax.serve.limits import Limits
from k3jax.serve.log import Log
from k3jax.serve.metrics import Metrics
from k3jax.serve.served import Served


class Server:
    """An app on a port of its own; `link` is its engine, `client` its view of it."""

    def __init__(self, *, ready=True, max_waiting=64, **limits):
        self.link = FakeLink()
        limits = Limits(max_waiting=max_waiting, **limits)
        self.client = EngineClient(self.link, Metrics(), limits)
        self.logged = io.StringIO()
        app = create_app(
            Served("k3-tiny", TOKENIZER, self.client), limits, Log("json", self.logged)
        )
        self._server = http_server(app, port=0, loop="none")
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    async def _serve(self, ready):
        self.loop = asyncio.get_running_loop()
        if ready:
            self.link.start(self.client)
        await self._server.serve()

    def connections(self):
        """Of clients that are not gone."""
        return list(self._server.server_state.connections)

    def call(self, function, *arguments):
        """Run a function in the server's event loop."""

        async def run():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def close(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(60)
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
