"""Conversations to prompts in Kimi-K3's tag format.

A prompt is a list of segments (text, is_control). Only this module makes control segments; each
other piece is encoded by itself as plain text, so what a user writes is never read as a tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3jax.tokenizer import Tokenizer

Segment = tuple[str, bool]
"""A piece of a prompt and whether it is a control token's name."""
Message = Mapping[str, Any]

OPEN = ("<|open|>", True)
CLOSE = ("<|close|>", True)
SEP = ("<|sep|>", True)
END_OF_MESSAGE = ("<|end_of_msg|>", True)

EFFORTS = ("low", "medium", "high", "max")

_TOOLS_HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS_HEAD = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True)
class ChatOptions:
    """What the prompt asks of the model beside the conversation.

    `thinking_effort` is one of EFFORTS (None: not said) and counts only with `thinking`;
    `tool_choice` is "auto", "required" or "none"; `response_format` is OpenAI's object with type
    "text", "json_object" or "json_schema".
    """

    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: ChatOptions | None = None,
) -> list[Segment]:
    """The segments of a conversation and of the opening of the assistant's answer.

    Messages are OpenAI's objects; reasoning is read from `reasoning_content` or `reasoning`, a
    system message may declare `tools`. Raises ValueError naming the message that cannot be said.
    """
    options = options or ChatOptions()
    segments: list[Segment] = []
    if tools:
        segments += _declare(_TOOLS_HEAD, tools)
    if options.thinking and options.thinking_effort is not None:
        if options.thinking_effort not in EFFORTS:
            raise ValueError(
                f"thinking_effort must be one of {', '.join(EFFORTS)}, "
                f"got {options.thinking_effort!r}"
            )
        segments += _internal("thinking-effort", _EFFORT.format(options.thinking_effort))
    calls: Sequence[Message] = ()
    position = 0
    for number, message in enumerate(_results_in_call_order(messages)):
        try:
            if message.get("role") == "assistant":
                calls, position = message.get("tool_calls") or (), 0
            if message.get("role") == "tool":
                position += 1
                segments += _tool_result(message, calls, position)
            else:
                segments += _message(message, options.thinking)
        except ValueError as error:
            raise ValueError(f"messages[{number}]: {error}") from error
    if options.tool_choice in _TOOL_CHOICE:
        segments += _internal("tool-choice", _TOOL_CHOICE[options.tool_choice])
    segments += _response_format(options.response_format or {})
    return [
        *segments,
        *_open("message", ("role", "assistant")),
        *_open("think" if options.thinking else "response"),
    ]


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids of a prompt, segment by segment; ValueError if a control token is missing."""
    ids: list[int] = []
    for text, is_control in segments:
        if is_control:
            ids.append(tokenizer.control(text))
        else:
            ids += tokenizer.encode(text)
    return ids


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that end an answer: end of message, and the end of text by name and by config."""
    names = [END_OF_MESSAGE[0], "[EOS]"]
    ids = {tokenizer.control(name) for name in names if tokenizer.has_control(name)}
    return sorted(ids | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set()))


def _text(text: str) -> list[Segment]:
    return [(text, False)] if text else []


def _open(name: str, *attributes: tuple[str, str]) -> list[Segment]:
    segments = [OPEN, (name, False)]
    for key, value in attributes:
        value = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [*_text(f" {key}"), *_text('="'), *_text(value), *_text('"')]
    return [*segments, SEP]


def _close(name: str) -> list[Segment]:
    return [CLOSE, (name, False), SEP]


def _whole(attributes: Sequence[tuple[str, str]], body: Sequence[Segment]) -> list[Segment]:
    return [*_open("message", *attributes), *body, *_close("message"), END_OF_MESSAGE]


def _internal(kind: str, body: str) -> list[Segment]:
    return _whole([("role", "system"), ("type", kind)], _text(body))


def _declare(head: str, tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    return _internal("tool-declare", f"{head}```json\n{_sorted_json(tools)}\n```")


def _response_format(response_format: Mapping[str, Any]) -> list[Segment]:
    kind = response_format.get("type", "text")
    if kind == "json_object":
        return _internal("response-format", _RESPONSE_FORMAT.format(kind))
    if kind == "json_schema":
        schema = _sorted_json(response_format["json_schema"]["schema"])
        body = f"{_RESPONSE_FORMAT.format(kind)}{_SCHEMA}```json\n{schema}\n```"
        return _internal("response-format", body)
    return []


def _message(message: Message, thinking: bool) -> list[Segment]:
    role = message.get("role")
    if role == "system" and message.get("tools"):
        return _declare(_NEW_TOOLS_HEAD, message["tools"])
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"role must be system, user, assistant or tool, got {role!r}")
    attributes = [("role", role)]
    if message.get("name"):
        attributes.append(("name", message["name"]))
    if role == "assistant":
        return _whole(attributes, _answer(message, thinking))
    return _whole(attributes, _content(message.get("content")))


def _answer(message: Message, thinking: bool) -> list[Segment]:
    """Think, response and tools of an assistant message."""
    segments: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        said = _text(reasoning if reasoning.strip() else "")
        segments += [*_open("think"), *said, *_close("think")]
    segments += [*_open("response"), *_content(message.get("content")), *_close("response")]
    if message.get("tool_calls"):
        segments += _open("tools")
        for index, call in enumerate(message["tool_calls"], start=1):
            segments += _call(call, index)
        segments += _close("tools")
    return segments


def _call(call: Message, index: int) -> list[Segment]:
    function = call.get("function", call)
    arguments = _arguments(function.get("arguments"))
    segments = _open("call", ("tool", function["name"]), ("index", str(index)))
    if isinstance(arguments, str):
        segments += [*_open("json", ("type", "object")), *_text(arguments), *_close("json")]
    else:
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value)
            segments += _open("argument", ("key", key), ("type", _type_name(value)))
            segments += [*_text(text), *_close("argument")]
    return [*segments, *_close("call")]


def _arguments(arguments: Any) -> Mapping[str, Any] | str:
    """A call's arguments as an object; a string that is no JSON stays as it is."""
    if isinstance(arguments, Mapping):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        raise ValueError("a tool call's arguments must be an object or the JSON text of one")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, Mapping):
        raise ValueError(f"a tool call's arguments must be a JSON object, got {arguments[:60]!r}")
    return parsed


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _content(content: Any) -> list[Segment]:
    """A message's text, given whole or in parts."""
    if content is None or isinstance(content, str):
        return _text(content or "")
    segments: list[Segment] = []
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"only text is read, not a part of type {part.get('type')!r}")
        segments += _text(part["text"])
    return segments


def _tool_result(message: Message, calls: Sequence[Message], position: int) -> list[Segment]:
    """The result of the call at the 1-based position in its run."""
    name = message.get("tool", message.get("name"))
    if name is None and position <= len(calls):
        name = calls[position - 1].get("function", calls[position - 1])["name"]
    if name is None:
        raise ValueError("a tool result needs a name, or a call of the assistant before it")
    attributes = [("role", "tool"), ("tool", name), ("index", str(position))]
    return _whole(attributes, _content(message.get("content")))


def _results_in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Sort each run of tool results by the call that its id names; a run that misses one stays."""
    ordered: list[Message] = []
    run: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}

    def end_run() -> None:
        identifiers = [str(result.get("tool_call_id", result.get("id", ""))) for result in run]
        if all(identifier in calls for identifier in identifiers):
            places = sorted(range(len(run)), key=lambda i: (calls[identifiers[i]][0], i))
            ordered.extend({**run[i], "tool": calls[identifiers[i]][1]} for i in places)
        else:
            ordered.extend(run)
        run.clear()

    for message in messages:
        if message.get("role") == "tool":
            run.append(message)
            continue
        end_run()
        ordered.append(message)
        if message.get("role") == "assistant":
            calls = {}
            for place, call in enumerate(message.get("tool_calls") or ()):
                if call.get("id") is not None:
                    name = call.get("function", call)["name"]
                    calls.setdefault(str(call["id"]), (place, name))
    end_run()
    return ordered


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error


def _sorted_json(value: Any) -> str:
    """JSON without blanks, keys sorted at every depth."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("a tool or a schema is nested too deeply") from error
