"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

RETRY_SECONDS = 1


class ApiError(Exception):
    """A request that is answered with an error; `param` names the field that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def type(self) -> str:
        """OpenAI's class of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        return {
            "error": {
                "message": _printable(self.message),
                "type": self.type,
                "param": None if self.param is None else _printable(self.param),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP answer; says when to come again if that can help."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller is wrong."""
    return ApiError(400, message, param=param, code=code)


def not_offered(what: str, param: str) -> ApiError:
    """The caller asks for what this server does not have."""
    return bad_request(f"{what} is not offered by this server", param, "unsupported_parameter")


async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
    """Handler of ApiError."""
    return error.response()


async def on_http_error(http: Request, error: HTTPException) -> JSONResponse:
    """Handler of the framework's own errors: no such route, wrong method, unreadable body."""
    headers = error.headers or {}
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {http.method} {http.url.path} here: /docs says what there is"
    elif error.status_code == 405:
        message = f"{http.url.path} takes {headers.get('Allow')}, not {http.method}"
    elif error.__cause__ is not None:
        message = f"the body is not JSON: {error.__cause__}".partition(";")[0]
    response = ApiError(error.status_code, message).response()
    response.headers.update(headers)
    return response


async def on_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    """Handler of requests that the models refuse: 400, naming the first field that is wrong."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", "")
        return bad_request(f"the body is not JSON: {reason}").response()
    if error.body is None:
        return bad_request("the body is empty: send a JSON object").response()
    if isinstance(error.body, bytes):
        return bad_request("send JSON, with Content-Type: application/json").response()
    first = _path(found[0], error.body)
    # Of the forms that a field may have, the one that fits best is wrong at the deepest place.
    paths = (_path(entry, error.body) for entry in found)
    param = max((path for path in paths if path.startswith(first)), key=len)
    same = [entry for entry in found if _path(entry, error.body) == param]
    reasons = dict.fromkeys(entry["msg"].removeprefix("Value error, ") for entry in same)
    message = ", or: ".join(list(reasons)[:3])
    return bad_request(f"{param}: {message}" if param else message, param or None).response()


async def on_crash(_: Request, error: Exception) -> JSONResponse:
    """Handler of everything else; the framework logs the error."""
    return ApiError(500, f"the server failed: {type(error).__name__}").response()


def _path(entry: Mapping[str, Any], body: Any) -> str:
    """The place of an error in the body, as messages[0].content; union tags are left out."""
    path = ""
    location: Sequence[Any] = entry["loc"][1:]
    for step in location:
        if isinstance(body, Mapping) and step in body:
            path += f".{step}" if path else str(step)
        elif isinstance(body, list) and isinstance(step, int) and 0 <= step < len(body):
            path += f"[{step}]"
        elif entry["type"] == "missing" and step == location[-1]:
            return f"{path}.{step}" if path else str(step)
        else:
            continue
        body = body[step]
    # A field of another server, which was read as one of ours, is not in the body by that name.
    return path or ".".join(step for step in location if isinstance(step, str))


def _printable(text: str) -> str:
    """A text that can be sent: lone surrogates, which a request may hold, are replaced."""
    return text.encode("utf-8", "replace").decode()


def install(app: FastAPI) -> None:
    """Answer every error of an app in OpenAI's shape."""
    app.exception_handler(ApiError)(on_api_error)
    app.exception_handler(HTTPException)(on_http_error)
    app.exception_handler(RequestValidationError)(on_invalid_request)
    app.exception_handler(Exception)(on_crash)
