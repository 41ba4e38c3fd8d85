"""Log lines on stderr: for people, or one JSON object each."""

from __future__ import annotations

import json
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

from k3jax.serve.limits import LogFormat

NOTES: ContextVar[dict[str, Any]] = ContextVar("notes")
"""Fields of the log line of the request that is being answered."""


class Log:
    """Writes lines of one format; with "none" only what is no request's."""

    def __init__(self, form: LogFormat, file: TextIO | None = None) -> None:
        self._form = form
        self._file = file

    def say(self, text: str) -> None:
        """Something about the server."""
        if self._form == "json":
            self._write_json("server", {"text": text})
        else:
            self._write(f"k3jax: {text}")

    def request(self, fields: dict[str, Any]) -> None:
        """A request that is over: id, method, path, status, seconds and what else is known."""
        if self._form == "json":
            self._write_json("request", fields)
        elif self._form == "text":
            rest = " ".join(f"{key}={value}" for key, value in fields.items())
            self._write(f"k3jax: request {rest}")

    def _write_json(self, event: str, fields: dict[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}Z"
        self._write(json.dumps({"time": stamp, "event": event, **fields}))

    def _write(self, line: str) -> None:
        print(line, file=self._file or sys.stderr, flush=True)


def note(**fields: Any) -> None:
    """Add fields to the log line of the request that is being answered."""
    NOTES.get({}).update(fields)
