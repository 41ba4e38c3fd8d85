"""What the front lets in: keys, origins, and how much of everything; with the flags that say so."""

from __future__ import annotations

import argparse
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LogFormat = Literal["none", "text", "json"]

KEYS_VARIABLE = "K3JAX_API_KEYS"


class Keys:
    """API keys; they are compared in constant time and never shown."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __repr__(self) -> str:
        return f"Keys({len(self._keys)})"

    def __bool__(self) -> bool:
        return bool(self._keys)

    def allow(self, authorization: bytes) -> bool:
        """Whether an Authorization header holds one of the keys; every key is looked at."""
        scheme, _, given = authorization.partition(b" ")
        found = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        return any(found) and scheme.lower() == b"bearer"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the front lets in. Sizes are in bytes, times in seconds."""

    keys: Keys = field(default_factory=lambda: Keys(()))
    origins: tuple[str, ...] = ()  # that scripts of other pages may come from; "*": any
    body_bytes: int = 32 * 2**20  # of one request
    bodies_bytes: int = 2**30  # of all that are being answered
    body_seconds: float = 60.0  # for a body to arrive
    write_seconds: float = 120.0  # that a client may not read while it is sent something
    request_seconds: float | None = None  # for an answer to be whole
    max_waiting: int = 256  # requests that may wait for a slot; more are told to come again
    log: LogFormat = "text"
    trace_directory: Path | None = None  # for profiles that are asked for; None: they are refused


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of Limits."""
    add = parser.add_argument
    add(
        "--api-keys",
        metavar="FILE",
        help=f"ask for one of its keys, a line each (default: those of {KEYS_VARIABLE}, if set)",
    )
    add(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let pages of this origin call the server, as https://chat.example; may be repeated",
    )
    add(
        "--max-body",
        type=_mebibytes,
        metavar="MIB",
        default=Limits.body_bytes,
        help="size of a request's body (default: 32)",
    )
    add(
        "--max-waiting",
        type=_whole,
        metavar="N",
        default=Limits.max_waiting,
        help="requests that may wait beside those that run (default: %(default)s)",
    )
    add(
        "--request-seconds",
        type=_positive,
        metavar="S",
        help="for an answer to be whole (default: any time)",
    )
    add(
        "--log",
        choices=("none", "text", "json"),
        default=Limits.log,
        help="a line for each request on stderr (default: %(default)s)",
    )
    add(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="profiles asked for at /admin/trace are written there (default: none are taken)",
    )


def limits_of(given: argparse.Namespace) -> Limits:
    """The limits that flags and environment ask for; ValueError or OSError for wrong keys."""
    return Limits(
        keys=read_keys(given.api_keys),
        origins=tuple(given.allow_origin),
        body_bytes=given.max_body,
        bodies_bytes=max(Limits.bodies_bytes, given.max_body),
        max_waiting=given.max_waiting,
        request_seconds=given.request_seconds,
        log=given.log,
        trace_directory=given.trace_dir,
    )


def read_keys(path: str | None) -> Keys:
    """Keys of a file, a line each, where # begins a comment line; else of the environment."""
    if path is None:
        text, source = os.environ.get(KEYS_VARIABLE, "").replace(",", "\n"), KEYS_VARIABLE
    else:
        source = f"--api-keys {path}"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ValueError(f"{source}: a key has characters that a header cannot carry")
    if path is not None and not keys:
        raise ValueError(f"{source} holds no keys")
    return Keys(keys)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _mebibytes(text: str) -> int:
    return int(_positive(text) * 2**20)
