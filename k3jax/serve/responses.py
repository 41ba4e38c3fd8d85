"""OpenAI's responses in their basic form: the chunks of a chat, with a name for every event.

Nothing is stored, so a response cannot be gone on from by its id; tools are functions only.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any, Literal

from msgspec import UNSET

from k3jax.serve import replies
from k3jax.serve.responses_request import ResponsesRequest
from k3jax.serve.stream import Head

Event = dict[str, Any]
Item = dict[str, Any]


async def response_events(
    request: ResponsesRequest, head: Head, chunks: AsyncIterator[replies.ChatChunk]
) -> AsyncIterator[Event]:
    """The only generator of a response: its events, the last with the whole of it."""
    stream = _ResponseStream(request, head)
    for event in stream.begin():
        yield event
    async for chunk in chunks:
        for event in stream.push(chunk):
            yield event
    for event in stream.end():
        yield event


async def fold_response(events: AsyncIterator[Event]) -> dict[str, Any]:
    """The response that a stream of events ends with."""
    last: Event = {}
    async for event in events:
        last = event
    return last["response"]


class _ResponseStream:
    """Items that grow with the chunks of a chat, and the events that say so."""

    def __init__(self, request: ResponsesRequest, head: Head) -> None:
        self._request = request
        self._head = head
        self._output: list[Item] = []
        self._open = False  # whether the last item goes on
        self._number = 0
        self._finish: str | None = None
        self._usage: replies.Usage | None = None

    def begin(self) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(self, chunk: replies.ChatChunk) -> list[Event]:
        if isinstance(chunk.usage, replies.Usage):
            self._usage = chunk.usage
        events: list[Event] = []
        for piece in chunk.choices:
            self._finish = piece.finish_reason or self._finish
            if piece.delta.reasoning_content is not UNSET:
                events += self._say("reasoning", piece.delta.reasoning_content)
            if piece.delta.content is not UNSET and piece.delta.content:
                events += self._say("message", piece.delta.content)
            for call in piece.delta.tool_calls or ():
                events += self._call(call)
        return events

    def end(self) -> list[Event]:
        cut_short = self._finish == "length"
        events = self._close("incomplete" if cut_short else "completed")
        kind = "incomplete" if cut_short else "completed"
        return [*events, self._event(f"response.{kind}", response=self._response(kind))]

    def _say(self, kind: Literal["reasoning", "message"], text: Any) -> list[Event]:
        """Text of the answer or of the reasoning."""
        part_type = "output_text" if kind == "message" else "reasoning_text"
        events: list[Event] = []
        if not self._open or self._output[-1]["type"] != kind:
            part: Item = {"type": part_type, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item = {"role": "assistant", "content": []}
            else:
                item = {"summary": [], "content": []}
            events += self._begin(kind, "msg" if kind == "message" else "rs", item)
            events.append(self._place("response.content_part.added", content_index=0, part=part))
            self._output[-1]["content"].append(dict(part))
        self._output[-1]["content"][0]["text"] += text
        fields: Item = {"logprobs": []} if kind == "message" else {}
        name = f"response.{part_type}.delta"
        return [*events, self._place(name, content_index=0, delta=text, **fields)]

    def _call(self, call: replies.ToolCall) -> list[Event]:
        events: list[Event] = []
        if call.id is not UNSET:
            item = {"call_id": call.id, "name": call.function.name, "arguments": ""}
            events += self._begin("function_call", "fc", item)
        if call.function.arguments:
            self._output[-1]["arguments"] += call.function.arguments
            name = "response.function_call_arguments.delta"
            events.append(self._place(name, delta=call.function.arguments))
        return events

    def _begin(self, kind: str, prefix: str, fields: Item) -> list[Event]:
        """Open an item, after the one before is closed."""
        events = self._close("completed")
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._output.append({**item, **fields})
        self._open = True
        place = len(self._output) - 1
        added = {**self._output[-1], "content": []} if "content" in fields else {**item, **fields}
        name = "response.output_item.added"
        return [*events, self._event(name, output_index=place, item=added)]

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events.append(self._place(name, arguments=item["arguments"], name=item["name"]))
        else:
            part = item["content"][0]
            fields: Item = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{part['type']}.done"
            events.append(self._place(name, content_index=0, text=part["text"], **fields))
            events.append(self._place("response.content_part.done", content_index=0, part=part))
        place = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=place, item=item)]

    def _place(self, type_name: str, **fields: Any) -> Event:
        """An event of the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(type_name, **place, **fields)

    def _event(self, type_name: str, **fields: Any) -> Event:
        event = {"type": type_name, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _response(self, status: str) -> dict[str, Any]:
        usage = self._usage
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._request.echoed,
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._head.model,
            "output": list(self._output),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: replies.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens
        },
        "total_tokens": usage.total_tokens,
    }
