"""What clients of OpenAI's responses ask, as the chat that it is in other words."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, ValidationError, model_validator

from k3jax.serve.chat_request import ChatRequest
from k3jax.serve.errors import bad_request, not_offered
from k3jax.serve.protocol import INT32, Strict, refuse_lacking

Item = dict[str, Any]
LACKING = ("background", "conversation", "previous_response_id", "prompt", "top_logprobs")
"""Fields that change an answer, and that this server does not have."""


class Reasoning(Strict):
    """How to think."""

    effort: Literal["none", "low", "medium", "high", "max"] | None = None


class TextOptions(Strict):
    """The form of the text."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def echoed(self) -> dict[str, Any]:
        """The fields that the response says again."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort},
            "temperature": self.temperature,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
        }

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_lacking(cls, data: Any) -> Any:
        refuse_lacking(data, LACKING)
        return data

    @model_validator(mode="after")
    def _can_be_echoed(self) -> Self:
        try:
            msgspec.json.encode(self.echoed)
        except (UnicodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the response could not say this again: {error}") from error
        return self

    def as_chat(self) -> ChatRequest:
        """The same request of /v1/chat/completions; ApiError for what is not offered."""
        fields = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _response_format((self.text and self.text.format) or {}),
            "stream": self.stream,
            "temperature": self.temperature,
            "tool_choice": _tool_choice(self.tool_choice),
            "tools": [_nested(tool) for tool in self.tools or ()] or None,
            "top_p": self.top_p,
        }
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(step) for step in first["loc"])
            name = "input" if place.startswith("messages") else place.partition(".")[0]
            raise bad_request(f"{place}: {first['msg']}", name) from error

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            try:
                _add_item(messages, item)
            except (KeyError, TypeError, AttributeError) as error:
                raise bad_request(f"input[{number}] is not an item: {error!r}", "input") from error
        return messages


def _add_item(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item to a conversation; what an assistant did in a row is one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = item["output"]
        text = output if isinstance(output, str) else _parts(output)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    elif kind == "message" and item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _parts(item["content"])})
    elif kind == "message":
        _assistant(messages, "content")["content"] = _text(item["content"])
    elif kind == "reasoning":
        _assistant(messages, "reasoning_content")["reasoning_content"] = _text(
            item.get("content") or item.get("summary") or []
        )
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        _assistant(messages, "").setdefault("tool_calls", []).append(call)
    else:
        raise not_offered(f"an item of type {kind!r}", "input")


def _assistant(messages: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """The assistant's message that is still being said, or a new one if it has that field."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or field in last:
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(content: Any) -> Any:
    """A content whose parts are called as in a chat."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text", "reasoning_text", "summary_text")
    return [{**part, "type": "text"} if part["type"] in texts else part for part in content]


def _text(content: Any) -> Any:
    """A content as one text."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content)


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise not_offered(f"a tool of type {tool.get('type')!r}", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise not_offered(f"a tool_choice of type {choice.get('type')!r}", "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(described: dict[str, Any]) -> dict[str, Any] | None:
    if described.get("type") != "json_schema":
        return described or None
    schema = {key: value for key, value in described.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}
