"""Reads the form of an answer out of a request: `structured_outputs` (vLLM), and what each API has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from triptych.errors import FieldViolation
from triptych.types.structured import StructuredOutputs
from triptych_services.frontend.openai.schema import ResponseFormat, SamplingBody, StructuredOutputsBody

_FORM_NAMES = {
    "json_": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Field of `StructuredOutputsBody` -> field of `StructuredOutputs`, and how clients write both."""


class Form(NamedTuple):
    """A form as a request has it."""

    form: StructuredOutputs | None = None
    """The form; None is free text."""
    path: str = "structured_outputs"
    """The path of the form in the body."""
    violations: tuple[FieldViolation, ...] = ()
    """Everything that is wrong with how it is written."""


def read_form(body: SamplingBody) -> Form:
    """Return the form that a completion or a chat completion asks for."""
    given = body.response_format
    form = Form() if given is None else _from_response_format(given)
    return with_structured_outputs(form, "response_format", body.structured_outputs)


def json_form(
    type: str, schema: Mapping[str, Any] | None, path: str, schema_path: str, *, is_strict: bool = True
) -> Form:
    """Return the form that the types text, json_object and json_schema of OpenAI's formats mean.

    Args:
        path: Of the format in the body.
        schema_path: Of its schema.
        is_strict: The schema is refused if it cannot be enforced whole.
    """
    if type == "text":
        return Form()
    if type == "json_object":
        return Form(StructuredOutputs(json_object=True), path)
    if schema is None:
        return missing(schema_path, "send the JSON schema of the answer")
    return Form(StructuredOutputs(json=schema, strict=is_strict), schema_path)


def missing(path: str, why: str) -> Form:
    """Return the form of a request that leaves out a field which the form needs."""
    return Form(None, path, (FieldViolation(path, f"is missing; {why}"),))


def with_structured_outputs(form: Form, name: str, structured: StructuredOutputsBody | None) -> Form:
    """Return the form of a request that may name it in two ways.

    Args:
        form: What the API's own field asks for.
        name: That field.
    """
    if structured is None:
        return form
    other = _from_structured_outputs(structured)
    if form == Form():
        return other
    why = "asks for a form, and structured_outputs for another form; send one of them"
    return other._replace(violations=(FieldViolation(name, why),))


def _from_response_format(given: ResponseFormat) -> Form:
    path = "response_format.json_schema"
    if given.type == "json_schema" and given.json_schema is None:
        return missing(path, "the type json_schema needs it")
    schema = given.json_schema.schema_ if given.json_schema is not None else None
    if given.json_schema is not None and schema is None:
        return missing(f"{path}.schema", "send the JSON schema of the answer")
    is_strict = given.json_schema is None or given.json_schema.strict is not False
    return json_form(given.type, schema, "response_format", f"{path}.schema", is_strict=is_strict)


def _from_structured_outputs(given: StructuredOutputsBody) -> Form:
    """Return what is set, perhaps none or several, and the path of the form if there is one."""
    values = {name: getattr(given, field) for field, name in _FORM_NAMES.items()}
    form = StructuredOutputs(
        **{name: value for name, value in values.items() if value is not None},
        any_whitespace=given.disable_any_whitespace is False,
        whitespace_pattern=given.whitespace_pattern,
    )
    names = list(form.given)
    return Form(form, f"structured_outputs.{names[0]}" if len(names) == 1 else "structured_outputs")
