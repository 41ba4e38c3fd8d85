"""The pages at `/` and `/docs`: plain files that ask nothing of any other host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Response

FILES = Path(__file__).parent
ROUTES = {"index.html": "/", "docs.html": "/docs"}
TYPES = {
    ".css": "text/css",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def install(app: FastAPI) -> None:
    """Serve the page and its files, all of them read once."""
    for path in sorted(path for path in FILES.iterdir() if path.suffix in TYPES):
        route = ROUTES.get(path.name, f"/page/{path.name}")
        app.get(route, include_in_schema=False)(_file(path))


def _file(path: Path) -> Callable[[], Awaitable[Response]]:
    content, media_type = path.read_bytes(), TYPES[path.suffix]

    async def send() -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return send
