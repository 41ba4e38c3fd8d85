"""What a client asks of an answer's form, as a grammar of the whole message around it.

The grammar begins where the prompt ends, inside think or response, and ends with the message. It
leaves the reasoning free; tags, tool names and argument keys are spelled out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from k3jax.tokenizer import Tokenizer

FORMS = ("json_schema", "regex", "choice", "grammar")
# JSON on one line, compact or with a blank after commas and colons, as writers of JSON make it: a
# model that is unsure what to say loses itself in any more blanks. Regular expressions.
_ONE_LINE = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    }
}
_JSON_TYPES = ("number", "boolean", "null", "object", "array")


@dataclass(frozen=True)
class Form:
    """A form of text: `kind` is one of FORMS, `value` a JSON schema, a regular expression, a list
    of texts, or a Lark or GBNF grammar.
    """

    kind: str
    value: Any

    def rules(self) -> dict[str, Any]:
        """The form as llguidance's grammar object; ValueError if it is not one."""
        if self.kind == "json_schema":
            schema = json.loads(self.value) if isinstance(self.value, str) else self.value
            return {"json_schema": {**_ONE_LINE, **schema} if isinstance(schema, dict) else schema}
        if self.kind == "regex":
            (rules,) = json.loads(LLMatcher.grammar_from_regex(self.value))["grammars"]
            return rules
        if self.kind == "choice":
            if not self.value:
                raise ValueError("a choice needs at least one text")
            return {"lark_grammar": f"start: {' | '.join(map(_quote, self.value))}"}
        return {"lark_grammar": grammar_from("grammar", self.value)}


@dataclass(frozen=True)
class Calls:
    """The calls that a message may hold: OpenAI's tool objects, whether several of them may be
    called at once, and whether one must be.
    """

    tools: Sequence[Mapping[str, Any]]
    parallel: bool = True
    required: bool = True


def constrain_text(form: Form) -> str:
    """A grammar of a bare text; ValueError if the form cannot be read."""
    return json.dumps({"grammars": [form.rules()]})


def constrain_message(
    tokenizer: Tokenizer, *, thinking: bool, form: Form | None = None, calls: Calls | None = None
) -> str:
    """A grammar of an assistant's message: its response in a form, or with calls.

    Without `calls` there can be none.

    Raises ValueError if the form cannot be read or the tokenizer lacks the control tokens.
    """
    tags = _Tags(tokenizer)
    lines = ["TEXT: /(.|\\n)*/", 'INDEX: "index=\\"" /[0-9]+/ "\\""', f"json: {_json({})}"]
    start = [f"TEXT {tags.close('think')} {tags.open('response')}"] if thinking else []
    close = tags.close("response")
    said = f"{'@answer' if form else 'TEXT'} {close}"
    if calls is not None:
        more = "call+" if calls.parallel else "call"
        called = f"{close} {tags.open('tools')} {more} {tags.close('tools')}"
        if calls.required or form is None:
            called = f"TEXT {called}"
        said = called if calls.required else f"({said} | {called})"
        lines += _call_rules(tags, calls.tools)
    start += [said, tags.close("message"), tags.control("<|end_of_msg|>")]
    lines.insert(0, f"start: {' '.join(start)}")
    grammars: list[dict[str, Any]] = [{"name": "message", "lark_grammar": "\n".join(lines)}]
    if form is not None and not (calls and calls.required):
        grammars.append({**form.rules(), "name": "answer"})
    return json.dumps({"grammars": grammars})


class _Tags:
    """Tags as pieces of a Lark rule."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def control(self, name: str) -> str:
        return f"<[{self._tokenizer.control(name)}]>"

    def open(self, name: str, rest: str = "") -> str:
        """A tag; `rest` are the pieces of its attributes."""
        begin = _quote(f"{name} " if rest else name)
        return f"{self.control('<|open|>')} {begin} {rest} {self.control('<|sep|>')}"

    def close(self, name: str) -> str:
        return f"{self.control('<|close|>')} {_quote(name)} {self.control('<|sep|>')}"


def _call_rules(tags: _Tags, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rules `call` and those below it; the arguments stand in the order of the schema."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    free = f"argument: {_argument(tags, 'KEY', _any_value(tags))}"
    rules += ['KEY: /[^"]*/', free]
    for number, tool in enumerate(tools):
        function = tool["function"]
        head = tags.open("call", f"{_attribute('tool', function['name'])} {_quote(' ')} INDEX")
        arguments = _arguments(tags, function.get("parameters") or {})
        rules.append(f"call_{number}: {head} {arguments} {tags.close('call')}")
    return rules


def _arguments(tags: _Tags, schema: Mapping[str, Any]) -> str:
    """The arguments of a schema's properties, or any if it names none."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return "argument*" if schema.get("additionalProperties", True) is not False else ""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    pieces = []
    for key, value in properties.items():
        piece = _argument(tags, _quote(_escape(key)), _value(tags, value, shared))
        pieces.append(f"({piece})" if key in required else f"({piece})?")
    return " ".join(pieces)


def _argument(tags: _Tags, key: str, type_and_value: str) -> str:
    opened = f'{tags.control("<|open|>")} "argument key=\\"" {key} "\\" type=\\""'
    return f"{opened} {type_and_value} {tags.close('argument')}"


def _value(tags: _Tags, schema: Any, shared: Mapping[str, Any]) -> str:
    """The type and the value of an argument: strings stand as they are, all else is JSON."""
    if not isinstance(schema, Mapping):
        return _any_value(tags)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return _alternatives(
            _typed(tags, _type_name(value), _quote(_literal(value))) for value in values
        )
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not types:
        return _any_value(tags)
    alternatives = []
    for name in dict.fromkeys(str(name) for name in types):
        if name == "string":
            alternatives.append(_typed(tags, "string", "TEXT"))
        else:
            said = "number" if name == "integer" else name
            narrowed = {**schema, **shared, "type": name}
            alternatives.append(_typed(tags, said, _json(narrowed)))
    return _alternatives(alternatives)


def _json(schema: Mapping[str, Any]) -> str:
    """A Lark rule of JSON that fits a schema."""
    return f"%json {json.dumps({**_ONE_LINE, **schema})}"


def _any_value(tags: _Tags) -> str:
    others = " | ".join(_quote(name) for name in _JSON_TYPES)
    return _alternatives([_typed(tags, "string", "TEXT"), _typed(tags, f"({others})", "json")])


def _typed(tags: _Tags, name: str, value: str) -> str:
    name = name if name.startswith("(") else _quote(name)
    return f'{name} "\\"" {tags.control("<|sep|>")} {value}'


def _alternatives(pieces: Iterable[str]) -> str:
    return f"({' | '.join(pieces)})"


def _attribute(key: str, value: str) -> str:
    return _quote(f'{key}="{_escape(value)}"')


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type_name(value: Any) -> str:
    names = {bool: "boolean", type(None): "null", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "number")


def _quote(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)
