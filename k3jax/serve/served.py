"""What an app serves, and how its replies are written."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from fastapi import Response

from k3jax.chat import end_ids
from k3jax.guided import Guides, grammar_threads
from k3jax.serve.client import EngineClient
from k3jax.tokenizer import Tokenizer

CLIENT_GONE = 499  # what others log for a client that did not wait; nobody reads it


@dataclass(frozen=True)
class Served:
    """A model by name, through an engine."""

    name: str
    tokenizer: Tokenizer
    client: EngineClient
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def grammar_threads(self) -> ThreadPoolExecutor:
        """Where grammars are checked."""
        return grammar_threads()

    @cached_property
    def guides(self) -> Guides:
        """What reads grammars; made when the first one comes, in about a second."""
        return Guides(self.tokenizer, end_ids(self.tokenizer))


def reply_of(reply: msgspec.Struct | dict[str, object] | None) -> Response:
    """A reply as JSON; None: the client has gone."""
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    return Response(msgspec.json.encode(reply), media_type="application/json")
