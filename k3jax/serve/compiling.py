"""Grammars are compiled beside the steps: one that takes seconds holds up its own request alone.

The engine belongs to the thread that steps it; here only matchers are made, which nobody else has
seen, and llguidance compiles without Python's lock. Other ranks never see a grammar, only masks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from k3jax.guided import Matcher, grammar_threads
from k3jax.request import Request

POLL_SECONDS = 0.01  # between two looks at grammars while there is nothing else to do


class Compiling:
    """Requests whose grammars are being compiled, in the order in which they came."""

    def __init__(self, compile_grammar: Callable[[Request], Matcher | None]) -> None:
        self._compile = compile_grammar
        self._pool = grammar_threads()
        self._open: dict[str, tuple[Request, Future[Matcher | None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: Request) -> None:
        """Begin a request's grammar."""
        self._open[request.request_id] = request, self._pool.submit(self._compile, request)

    def drop(self, request_id: str) -> None:
        """Nobody waits for this request any more; one that is not here passes."""
        _, future = self._open.pop(request_id, (None, None))
        if future is not None:
            future.cancel()

    def ready(self) -> list[tuple[Request, Future[Matcher | None]]]:
        """Requests whose grammars are compiled, or cannot be; they are here no longer."""
        done = [entry for entry in self._open.values() if entry[1].done()]
        for request, _ in done:
            del self._open[request.request_id]
        return done

    def close(self) -> None:
        """Wait for no grammar."""
        self._pool.shutdown(wait=False, cancel_futures=True)
