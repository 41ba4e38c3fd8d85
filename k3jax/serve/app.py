"""The ASGI application: which route is answered by what."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from k3jax.serve import errors, openapi, page
from k3jax.serve.generate import Generate
from k3jax.serve.guard import Guard
from k3jax.serve.limits import Limits
from k3jax.serve.log import Log
from k3jax.serve.operate import Operate
from k3jax.serve.served import Served


def create_app(served: Served, limits: Limits, log: Log) -> ASGIApp:
    """The application of one model, behind its limits."""
    app = FastAPI(title="k3jax", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    errors.install(app)
    generate, operate = Generate(served), Operate(served, limits.trace_directory)
    app.post("/v1/completions")(generate.completions)
    app.post("/v1/chat/completions")(generate.chat)
    app.post("/v1/responses")(generate.responses)
    app.post("/tokenize")(generate.tokenize)
    app.post("/detokenize")(generate.detokenize)
    app.get("/v1/models")(operate.models)
    app.get("/v1/models/{name:path}")(operate.model)
    app.get("/health")(operate.health)
    app.get("/ready")(operate.ready)
    app.get("/metrics")(operate.metrics)
    app.post("/admin/trace")(operate.trace)
    page.install(app)
    openapi.install(app, keys=bool(limits.keys))
    guarded = Guard(app, limits, log)
    if not limits.origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=limits.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
