"""The routes about the server itself."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from k3jax.serve import replies
from k3jax.serve.errors import ApiError, not_offered
from k3jax.serve.protocol import Strict
from k3jax.serve.served import Served, reply_of


class TraceRequest(Strict):
    """How many steps to profile."""

    steps: Annotated[int, Field(ge=1, le=1000)] = 16


class Operate:
    """The routes about the server itself."""

    def __init__(self, served: Served, trace_directory: Path | None = None) -> None:
        self._served = served
        self._directory = trace_directory
        self._client = served.client

    async def models(self) -> Response:
        """GET /v1/models: the one that is served."""
        return reply_of(replies.ModelList(data=[self._card()]))

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME: that one, if it is served."""
        if name != self._served.name:
            raise ApiError(404, f"there is no model {name!r} here", code="model_not_found")
        return reply_of(self._card())

    async def health(self) -> Response:
        """GET /health: 200 as long as the engine lives, also while it loads.

        The detail says why it failed, or why it runs without kernels.
        """
        failed = self._client.state == "failed"
        detail = self._client.failure or self._client.notice
        state = {"status": self._client.state, "detail": detail}
        return JSONResponse(state, status_code=503 if failed else 200)

    async def ready(self) -> Response:
        """GET /ready: 200 when requests are served, 503 before, after and while draining."""
        state = {"status": self._client.state, "detail": self._client.progress}
        return JSONResponse(state, status_code=200 if self._client.state == "ready" else 503)

    async def metrics(self) -> Response:
        """GET /metrics, in Prometheus' text format."""
        content = self._client.metrics.text()
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def trace(self, body: TraceRequest) -> Response:
        """POST /admin/trace: profile the next steps, for TensorBoard or Perfetto."""
        if self._directory is None:
            raise not_offered("a profile (start the server with --trace-dir)", "steps")
        stamp = time.strftime("%Y%m%d-%H%M%S") + f"-{secrets.token_hex(3)}"
        directory = self._directory / stamp
        await self._client.trace(body.steps, str(directory.resolve()))
        return reply_of({"directory": str(directory), "steps": body.steps})

    def _card(self) -> replies.ModelCard:
        info = self._client.info
        return replies.ModelCard(
            id=self._served.name,
            created=self._served.created,
            max_model_len=None if info is None else info.max_context,
        )
