"""Declarations of tools, and the texts that they return."""

from __future__ import annotations

import json
from typing import Any

from checkpoints.recipe.draw import Draw


def tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """OpenAI's declaration of a function; every parameter, given with its type, is required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def result(draw: Draw, value: Any, key: str = "result") -> str:
    """How a tool returns a value: bare, or as JSON."""
    return str(value) if draw.chance(0.7) else json.dumps({key: value}, ensure_ascii=False)
