"""The description of the routes, at /openapi.json; /docs shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from k3jax import __version__
from k3jax.serve import fields, replies

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATE: Schema = {
    "type": "object",
    "required": ["status", "detail"],
    "properties": {
        "status": {"enum": ["starting", "ready", "draining", "failed"]},
        "detail": _TEXT,
    },
}
_IDS: Schema = {"type": "array", "items": {"type": "integer"}}
_ENCODED: Schema = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {
        "count": {"type": "integer"},
        "max_model_len": {"type": ["integer", "null"]},
        "tokens": _IDS,
    },
}
_DECODED: Schema = {"type": "object", "required": ["prompt"], "properties": {"prompt": _TEXT}}
_RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "status", "output"],
    "properties": {"object": {"const": "response"}, "output": {"type": "array"}},
}
_TRACED: Schema = {
    "type": "object",
    "required": ["directory", "steps"],
    "properties": {"directory": _TEXT, "steps": {"type": "integer"}},
}
_REPLIES: dict[str, type[msgspec.Struct] | Schema] = {
    "/v1/completions": replies.Completion,
    "/v1/chat/completions": replies.ChatCompletion,
    "/v1/responses": _RESPONSE,
    "/v1/models": replies.ModelList,
    "/v1/models/{name}": replies.ModelCard,
    "/tokenize": _ENCODED,
    "/detokenize": _DECODED,
    "/admin/trace": _TRACED,
    "/health": _STATE,
    "/ready": _STATE,
}
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_MAY_BE_UNWELL = ("/health", "/ready")  # they answer 503 with a state, no error


def install(app: FastAPI, *, keys: bool) -> None:
    """Serve the description, made when it is first asked for; `keys`: a key must be sent."""

    def describe() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, keys)
        return app.openapi_schema

    replacement: Callable[[], Schema] = describe
    app.openapi = replacement  # type: ignore[method-assign]


def _describe(app: FastAPI, keys: bool) -> Schema:
    schema = get_openapi(
        title="k3jax",
        version=__version__,
        description="Kimi-K3 behind OpenAI's API.",
        routes=app.routes,
    )
    structs = [reply for reply in _REPLIES.values() if isinstance(reply, type)]
    found, named = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/Reply{name}"
    )
    described = dict(zip(structs, found, strict=True))
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(
        {f"Reply{name}": value for name, value in named.items()}
    )
    components["schemas"]["Error"] = _ERROR
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    fields.describe(components["schemas"])
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        reply = _REPLIES.get(path)
        for operation in operations.values():
            content = described[reply] if isinstance(reply, type) else reply
            operation["responses"] = _responses(path, content)
    return schema


def _responses(path: str, content: Schema | None) -> Schema:
    """What a route may answer; without a schema it is text."""
    good: Schema = {"text/plain": {"schema": _TEXT}}
    if content is not None:
        good = {"application/json": {"schema": content}}
    if path in _STREAMED:
        good["text/event-stream"] = {}
    responses = {"200": {"description": "As asked.", "content": good}}
    if path in _MAY_BE_UNWELL:
        return {**responses, "503": {"description": "Not now.", "content": good}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {**responses, "default": {"description": "An error.", "content": error}}
