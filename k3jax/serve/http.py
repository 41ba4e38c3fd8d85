"""uvicorn as this server runs it: patient with answers, not with requests that do not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # for a request's first line and headers to arrive
IDLE_SECONDS = 300  # a client's pool may keep a connection so long between requests


class Protocol(H11Protocol):
    """Closes a connection on which a request was begun, or promised, and does not come."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends; one whose last answer nobody reads is cut off."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch(self) -> None:
        """The clock runs from a head's first byte until the head is whole."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self.head_timer is None and not self.transport.is_closing():
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_watching(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """A server that leaves the signals to the front."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, *, drain_seconds: int = 1, **options: Any) -> HttpServer:
    """A server of an app, not started."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=drain_seconds,
            **options,
        )
    )
