"""An answer's events to the message that the conversation goes on with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k3jax.chat.parse import ChatEvent


def message_of(events: Iterable[ChatEvent]) -> dict[str, Any]:
    """Fold what `ChatParser` gave into OpenAI's assistant message.

    `reasoning_content` and `tool_calls` are there only if the answer has them; the calls' ids are
    call_1, call_2 and so on, and `arguments` is JSON text, unfinished if the answer was cut short.
    """
    said = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "call":
            function = {"name": event.text, "arguments": ""}
            calls.append(
                {"id": f"call_{event.index + 1}", "type": "function"} | {"function": function}
            )
        elif event.kind == "arguments":
            calls[event.index]["function"]["arguments"] += event.text
        else:
            said[event.kind] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
    if said["reasoning"]:
        message["reasoning_content"] = said["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message
