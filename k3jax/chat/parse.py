"""The model's ids to what it said: reasoning, answer and tool calls, as they come.

One id at a time drives the parser, so the result never depends on how the stream was cut. A model
may skip tags, forget to end them, nest or invent them: what it wrote then is content, never lost.
Only these are dropped: well-formed tags, blanks between tags, and a tag that the end of the
stream cut short.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from k3jax.tokenizer import Tokenizer

EventKind = Literal["reasoning", "content", "call", "arguments"]
Channel = Literal["think", "response", "argument", "json", "between"]

HEADER_CHARACTERS = 1024  # a longer tag is text: what follows `<|open|>` is held back so far
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "message": ("role", "name", "type", "tool", "index"),
    "think": (),
    "response": (),
    "tools": (),
    "call": ("tool", "index"),
    "argument": ("key", "type"),
    "json": ("type",),
}
"""The tags and the attributes that they are known to have; others are read and passed over."""
_CHANNEL: dict[str, Channel] = {"think": "think", "response": "response"}
_ATTRIBUTE = r'\s+[a-z]+="[^"]*"'
_HEADER = re.compile(rf"\s*([a-z]+)((?:{_ATTRIBUTE})*)(.*)", re.DOTALL)
_UNFINISHED = re.compile(
    rf'\s*([a-z]*)((?:{_ATTRIBUTE})*(?:\s+(?:([a-z]+)(?:=(?:"([^"]*))?)?)?)?)', re.DOTALL
)
_NAME = re.compile(r"[\w.:/-]*")
_PAIR = re.compile(r'([a-z]+)="([^"]*)"')


@dataclass(frozen=True)
class ChatEvent:
    """A piece of what the model said.

    `call` opens tool call number `index` (from 0) with its name as text; `arguments` is a piece
    of the JSON text of that call's arguments, unfinished where the stream ended inside it.
    """

    kind: EventKind
    text: str
    index: int = 0


class ChatParser:
    """Parses one answer, whose prompt ended inside think (`thinking`) or response.

    Raises ValueError if the tokenizer lacks one of the format's control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._open_id, self._close_id, self._sep_id = (
            tokenizer.control(name) for name in ("<|open|>", "<|close|>", "<|sep|>")
        )
        self._ends = {tokenizer.control("<|end_of_msg|>"), tokenizer.eos_id}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._channel: Channel = "think" if thinking else "response"
        self._tag: Literal["open", "close"] | None = None  # whose header is being read
        self._header = ""
        self._blanks = ""  # between tags, kept in case text follows
        self._call: _Call | None = None
        self._calls = 0
        self._events: list[ChatEvent] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the next id belongs to the think channel."""
        return self._channel == "think"

    @property
    def in_content(self) -> bool:
        """Whether text of the next id is content."""
        return self._tag is None and self._channel in ("response", "between")

    def push(self, ids: Iterable[int]) -> list[ChatEvent]:
        """What these ids add, neighbours of a kind joined."""
        for token in ids:
            if self._tokenizer.is_control(token):
                self._read_text(self._decoder.decode(b"", True))
                self._decoder.reset()
                self._read_control(token)
            else:
                self._read_text(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return self._take()

    def finish(self) -> list[ChatEvent]:
        """What was still held back; a call that is not complete stays so."""
        self._read_text(self._decoder.decode(b"", True))
        if self._tag is not None and not _is_cut_short(self._header):
            self._end_header(terminated=False)
        if self._call is not None:
            self._emit_arguments(self._call.cut_short())
        return self._take()

    def _read_control(self, token: int) -> None:
        if self._tag is not None:
            self._end_header(terminated=token == self._sep_id)
        if token == self._open_id:
            self._tag = "open"
        elif token == self._close_id:
            self._tag = "close"
        elif token in self._ends:
            self._leave("between")

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if self._tag is None:
            self._say(text)
            return
        self._header += text
        if not _may_become_tag(self._tag, self._header):
            self._end_header(terminated=False)

    def _end_header(self, *, terminated: bool) -> None:
        """Act on the tag that was read; what turns out to be no tag is text."""
        tag, header = self._tag, self._header
        self._tag, self._header = None, ""
        match = _HEADER.fullmatch(header)
        if match is None:
            self._say(header)
            return
        name, attributes, rest = match.groups()
        rest = rest if rest.strip() else ""
        known = not rest or not (terminated or rest[0].isalnum())
        if known and tag == "open":
            values = {key: _unescape(value) for key, value in _PAIR.findall(attributes)}
            known = self._open(name, values)
        elif known:
            known = not attributes and self._close(name)
        self._say(rest if known else header)

    def _open(self, name: str, attributes: dict[str, str]) -> bool:
        """Enter a tag; False if it may not stand here."""
        if name in ("message", "think", "response", "tools"):
            self._leave(_CHANNEL.get(name, "between"))
            return True
        if name == "call" and "tool" in attributes:
            self._leave("between")
            self._call = _Call(self._calls)
            self._calls += 1
            self._events.append(ChatEvent("call", attributes["tool"], self._call.index))
            return True
        if self._call is None:
            return False
        if name == "argument" and "key" in attributes and not self._call.raw:
            text = self._call.end_value()
            text += self._call.start_value(attributes["key"], attributes.get("type", ""))
            self._emit_arguments(text)
            self._set_channel("argument")
            return True
        if name == "json" and not self._call.keys and not self._call.raw:
            self._call.raw = True
            self._set_channel("json")
            return True
        return False

    def _close(self, name: str) -> bool:
        """Leave a tag; False if there is no such tag."""
        if name in ("argument", "json"):
            if self._channel == name and self._call is not None:
                self._emit_arguments(self._call.end_value())
                self._set_channel("between")
            return True
        if name in _ATTRIBUTES:
            self._leave("between")
        return name in _ATTRIBUTES

    def _leave(self, channel: Channel) -> None:
        """End the open call, if any, and go on in another channel."""
        if self._call is not None:
            self._emit_arguments(self._call.end())
            self._call = None
        self._set_channel(channel)

    def _set_channel(self, channel: Channel) -> None:
        self._channel = channel
        self._blanks = ""

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._channel == "think":
            self._events.append(ChatEvent("reasoning", text))
        elif self._channel == "response":
            self._events.append(ChatEvent("content", text))
        elif self._channel == "between":
            self._blanks += text
            if not text.isspace():
                self._events.append(ChatEvent("content", self._blanks))
                self._blanks = ""
        elif self._call is not None:
            self._emit_arguments(self._call.add(text))

    def _emit_arguments(self, text: str) -> None:
        if text and self._call is not None:
            self._events.append(ChatEvent("arguments", text, self._call.index))

    def _take(self) -> list[ChatEvent]:
        """The events since the last call, joined where they go on from each other."""
        joined: list[ChatEvent] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if last and last.kind == event.kind != "call" and last.index == event.index:
                joined[-1] = ChatEvent(event.kind, last.text + event.text, event.index)
            else:
                joined.append(event)
        self._events = []
        return joined


class _Call:
    """The JSON text of one call's arguments; methods return the piece that they add."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.raw = False  # one json block, passed on as it is
        self.keys = 0
        self._in_value = False
        self._is_string = False
        self._held = ""  # of a value that is no string, until it can be checked
        self._said = False  # text of a json block

    def start_value(self, key: str, type_name: str) -> str:
        prefix = "{" if self.keys == 0 else ", "
        self.keys += 1
        self._in_value, self._is_string, self._held = True, type_name == "string", ""
        return f"{prefix}{_quote(key)}: " + ('"' if self._is_string else "")

    def add(self, text: str) -> str:
        if self.raw:
            self._said = True
            return text
        if self._is_string:
            return _quote(text)[1:-1]
        self._held += text
        return ""

    def end_value(self) -> str:
        if not self._in_value:
            return ""
        self._in_value = False
        if self._is_string:
            return '"'
        return self._held.strip() if _is_json(self._held) else _quote(self._held)

    def end(self) -> str:
        """Make the text whole: the model ended the call, or began something else."""
        if self.raw:
            return "" if self._said else "{}"
        return self.end_value() + ("}" if self.keys else "{}")

    def cut_short(self) -> str:
        """Give what is held; the text stays unfinished, so nobody takes the call for complete."""
        return self._held if self._in_value and not self._is_string else ""


def _may_become_tag(tag: str, header: str) -> bool:
    """Whether more text can make a known tag of a header."""
    match = _UNFINISHED.fullmatch(header) if len(header) <= HEADER_CHARACTERS else None
    if match is None:
        return False
    name, attributes = match[1], match[2]
    if attributes:
        return name in _ATTRIBUTES and (tag == "open" or attributes.isspace())
    return any(known.startswith(name) for known in _ATTRIBUTES)


def _is_cut_short(header: str) -> bool:
    """Whether a header that may become a tag is the beginning of one, and no text.

    That is half a tag's name, or half of an attribute that the tag is known to have, whose value
    so far reads like a name.
    """
    match = _UNFINISHED.fullmatch(header)
    if match is None:
        return False
    name, _, key, value = match.groups()
    if name not in _ATTRIBUTES:
        return True
    known = key is not None and any(known.startswith(key) for known in _ATTRIBUTES[name])
    return known and _NAME.fullmatch(value or "") is not None


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
