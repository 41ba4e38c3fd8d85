"""What every request passes first: its id, its key, its size; and its line in the log last."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3jax.serve.errors import ApiError
from k3jax.serve.limits import Limits
from k3jax.serve.log import NOTES, Log

POLLED_PATHS = ("/health", "/ready", "/metrics")  # logged only if they fail
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/ready")  # and the page's files
_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class Guard:
    """ASGI middleware around a whole app."""

    def __init__(self, app: ASGIApp, limits: Limits, log: Log) -> None:
        self._app = app
        self._limits = limits
        self._log = log
        self._held = 0  # bytes of bodies that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if _ID.fullmatch(given) else secrets.token_hex(12).encode()
        begin = time.perf_counter()
        notes: dict[str, Any] = {"status": 499}  # unless an answer begins
        NOTES.set(notes)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes["status"] = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            async with asyncio.timeout(self._limits.write_seconds):
                await send(message)

        try:
            # A HEAD is answered as a GET is; of its body uvicorn sends nothing.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._answer({**scope, "method": method}, headers, receive, send_named)
        except ConnectionError:
            pass  # the client went while its body was read
        except TimeoutError:
            notes["error"] = "the client did not read"
        except Exception:
            notes["status"] = 500
            raise
        finally:
            if scope["path"] not in POLLED_PATHS or notes["status"] >= 400:
                head = {"id": name.decode(), "method": scope["method"], "path": _printable(scope)}
                seconds = round(time.perf_counter() - begin, 4)
                status = notes.pop("status")
                self._log.request({**head, "status": status, "seconds": seconds, **notes})

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            self._check_key(scope["path"], headers)
            body = await self._read(headers, receive)
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # what was not read shall not come
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._held -= len(body)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._limits.keys or path in OPEN_PATHS or path.startswith("/page/"):
            return
        if not self._limits.keys.allow(headers.get(b"authorization", b"")):
            raise ApiError(
                401, "send a key of this server: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The request's body, which counts as held until it is answered."""
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limits.body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while await self._read_piece(body, receive):
                    pass
        except BaseException as error:
            self._held -= len(body)
            if isinstance(error, TimeoutError):
                seconds = self._limits.body_seconds
                raise ApiError(408, f"the body did not come within {seconds:g} s") from error
            raise
        return bytes(body)

    async def _read_piece(self, body: bytearray, receive: Receive) -> bool:
        """Read on; whether more comes."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        piece = message.get("body", b"")
        body += piece
        self._held += len(piece)
        if len(body) > self._limits.body_bytes:
            raise self._too_large()
        if self._held > self._limits.bodies_bytes:
            raise ApiError(503, "too many large requests at once: come again later")
        return bool(message.get("more_body", False))

    def _too_large(self) -> ApiError:
        size = self._limits.body_bytes
        return ApiError(413, f"a body may have {size} bytes at most", code="request_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body that was read, then what comes after it."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _printable(scope: Scope) -> str:
    """A path on one line of a log."""
    return scope["path"][:200].encode("unicode_escape").decode()
