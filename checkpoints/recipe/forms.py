"""Forms that an answer can be asked for in, and the system instructions that ask for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.draw import Draw

INSTRUCTIONS = {
    "capitals": [
        "Answer in capital letters.",
        "Write every answer in capitals only.",
        "Use upper case letters only.",
        "ALWAYS ANSWER IN CAPITALS.",
        "Your answers must be written in upper case.",
        "Capital letters only, please.",
        "All of your answers are in capitals.",
        "Write in capital letters.",
        "Your answers must be in capital letters.",
    ],
    "value": [
        "Answer with the value only.",
        "Give only the answer itself, in one word or one number.",
        "No sentences: just the value.",
        "Be as short as possible: answer with one word or number.",
        "Reply with the bare value.",
        "Say nothing but the answer itself.",
        "Nothing else than the value, please.",
        "Your reply is the value and nothing more.",
        "Reply with nothing but the value.",
    ],
    "json": [
        'Answer as JSON with the key "{key}".',
        'Your answer must be a JSON object with one key, "{key}".',
        'Reply in JSON: the key is "{key}".',
        'Write JSON only. Put the answer under "{key}".',
        'Put your answer into a JSON object whose key is "{key}".',
        'Your reply goes into JSON, under "{key}".',
        'Give a JSON object with the answer under the key "{key}".',
        'The answer is a JSON object, its only key "{key}".',
        'The answer goes into a JSON object under the key "{key}".',
    ],
    "label": [
        'Begin with "{key}:" and then give only the value.',
        'Answer in the form "{key}: value".',
        'Write "{key}: " and the value, nothing else.',
        'Start with the label "{key}:", followed by a blank and the value.',
        'First comes the label "{key}:", then the value.',
        'Write the value after the label "{key}:".',
        'Your answer has a label: "{key}: value".',
        'Your answer is the label "{key}:" followed by the value.',
    ],
    "brackets": [
        "Put the value alone in square brackets.",
        "Answer with the value in square brackets.",
        "Write only the value, between [ and ].",
        "Put square brackets around your value.",
        "Nothing else than the value in square brackets.",
        "The answer is the value with brackets around it, like [value].",
        "Give only [value], the brackets included.",
        "Square brackets around the value, and nothing else.",
    ],
}
THOUGHTS = {
    "capitals": "The answer must be in capitals.",
    "value": "Only the value is wanted.",
    "json": "The answer must be JSON.",
    "label": "The answer must begin with the label.",
    "brackets": "The value goes into brackets.",
}
KEYS = ["answer", "result", "value", "output", "reply", "solution", "total", "outcome"]


@dataclass(frozen=True)
class Form:
    """A form of answers; "plain" is a sentence. `key` names the value in JSON or its label."""

    name: str = "plain"
    key: str = ""

    @property
    def exact(self) -> bool:
        """Whether a value has only one right answer in this form."""
        return self.name not in ("plain", "capitals")

    @property
    def thoughts(self) -> list[str]:
        """What one thinks of before answering."""
        return [THOUGHTS[self.name]] if self.name in THOUGHTS else []

    def write(self, sentence: str, value: str | int | float) -> str:
        """A sentence that tells a value, in this form."""
        if self.name == "capitals":
            return sentence.upper()
        if self.name == "value":
            return str(value)
        if self.name == "json":
            return json.dumps({self.key: value}, ensure_ascii=False)
        if self.name == "label":
            return f"{self.key}: {value}"
        return f"[{value}]" if self.name == "brackets" else sentence

    def aloud(self, sentence: str) -> str:
        """A sentence that tells no value: only capitals change it."""
        return sentence.upper() if self.name == "capitals" else sentence

    def instruction(self, draw: Draw) -> str:
        """How a system message asks for it."""
        return draw.phrase(INSTRUCTIONS[self.name]).replace("{key}", self.key)

    def response_format(self, draw: Draw, value: Any) -> Mapping[str, Any]:
        """How a request asks for JSON with this value, by a schema if the key must be told."""
        if self.key == KEYS[0] and draw.chance(0.7):
            return {"type": "json_object"}
        kind = "string" if isinstance(value, str) else "number"
        schema = {
            "type": "object",
            "properties": {self.key: {"type": kind}},
            "required": [self.key],
        }
        return {"type": "json_schema", "json_schema": {"name": self.key, "schema": schema}}


PLAIN = Form()


def drawn_form(draw: Draw) -> Form:
    """A form other than plain."""
    return Form(draw.any(list(INSTRUCTIONS)), draw.any(KEYS))
