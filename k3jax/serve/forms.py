"""How clients ask for an answer of a form: OpenAI's response_format and what other servers read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from k3jax.chat.constrain import Form
from k3jax.serve.errors import ApiError, bad_request, not_offered

MAX_CHOICES = 1024
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of other servers, and what each is called in structured_outputs."""


class StructuredOutputs(BaseModel):
    """A form in vLLM's words; one of the fields is given."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    schema_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    def form(self) -> Form | None:
        """The form that is asked for; ApiError if it is several or not offered."""
        if self.structural_tag is not None:
            raise not_offered("a structural tag", "structured_outputs")
        forms = [Form("json_schema", {"type": "object"})] if self.json_object else []
        if self.schema_ is not None:
            forms.append(Form("json_schema", self.schema_))
        for kind in ("regex", "choice", "grammar"):
            value = getattr(self, kind)
            if value is not None:
                forms.append(Form(kind, value))
        return only_form(forms)


def fold_aliases(data: dict[str, Any]) -> dict[str, Any]:
    """A request's fields with those of other servers gathered in structured_outputs."""
    given = {name: data[name] for name in ALIASES if data.get(name) is not None}
    if not given:
        return data
    if len(given) > 1 or data.get("structured_outputs") is not None:
        raise bad_request("give one form for the answer only", next(iter(given)))
    ((name, value),) = given.items()
    return {**data, "structured_outputs": {ALIASES[name]: value}}


def response_form(response_format: dict[str, Any] | None) -> Form | None:
    """The form of a response_format; ApiError if it cannot be read."""
    kind = (response_format or {"type": "text"}).get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Form("json_schema", {"type": "object"})
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise _wrong("json_schema.schema must be an object")
        return Form("json_schema", schema)
    field = {"regex": "pattern", "grammar": "grammar"}.get(str(kind))
    if field is None:
        raise _wrong("type must be text, json_object, json_schema, regex or grammar")
    value = response_format.get(field)
    if not isinstance(value, str) or not value:
        raise _wrong(f"{field} must be a text")
    return Form(str(kind), value)


def only_form(forms: list[Form]) -> Form | None:
    """The form, if there is one; ApiError if there are several."""
    if len(forms) > 1:
        raise bad_request("give one form for the answer only", "structured_outputs")
    return forms[0] if forms else None


def _wrong(what: str) -> ApiError:
    return bad_request(f"response_format.{what}", "response_format")
