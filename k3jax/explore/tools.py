"""Running the tools that a model calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def run_call(
    call: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """The tool message that answers one of a message's `tool_calls`.

    A call that cannot be run is answered with what is wrong, as a server's tools do, so that the
    model can try again: an unknown name, arguments that are no JSON object or do not fit.
    """
    called = call["function"]
    try:
        result = str(functions[called["name"]](**json.loads(called["arguments"] or "{}")))
    except KeyError:
        result = f"error: there is no tool {called['name']!r}"
    except (TypeError, ValueError) as error:
        result = f"error: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}
