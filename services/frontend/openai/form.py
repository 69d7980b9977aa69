"""Reads the form of an answer out of `response_format` (OpenAI) and `structured_outputs` (vLLM)."""

from __future__ import annotations

from services.frontend.openai.schema import ResponseFormat, SamplingBody, StructuredOutputsBody
from triptych.errors import FieldViolation
from triptych.types.structured import StructuredOutputs

_FORM_NAMES = {
    "json_": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Field of `StructuredOutputsBody` -> field of `StructuredOutputs`, and how clients write both."""


def read_form(body: SamplingBody) -> tuple[StructuredOutputs | None, str, list[FieldViolation]]:
    """Return the form, its path in the body, and what is wrong with how it is written. None: free text."""
    form, path = None, "structured_outputs"
    if body.structured_outputs is not None:
        form, path = _from_structured_outputs(body.structured_outputs)
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return form, path, []
    if form is not None:
        why = f"asks for {response_format.type}, and structured_outputs for another form; send one of them"
        return form, path, [FieldViolation("response_format", why)]
    return _from_response_format(response_format)


def _from_response_format(
    given: ResponseFormat,
) -> tuple[StructuredOutputs | None, str, list[FieldViolation]]:
    if given.type == "json_object":
        return StructuredOutputs(json_object=True), "response_format", []
    path = "response_format.json_schema"
    if given.json_schema is None:
        return None, path, [FieldViolation(path, "is missing; the type json_schema needs it")]
    path += ".schema"
    if given.json_schema.schema_ is None:
        return None, path, [FieldViolation(path, "is missing; send the JSON schema of the answer")]
    return StructuredOutputs(json=given.json_schema.schema_), path, []


def _from_structured_outputs(given: StructuredOutputsBody) -> tuple[StructuredOutputs, str]:
    """Return what is set, perhaps none or several, and the path of the form if there is one."""
    values = {name: getattr(given, field) for field, name in _FORM_NAMES.items()}
    form = StructuredOutputs(
        **{name: value for name, value in values.items() if value is not None},
        any_whitespace=given.disable_any_whitespace is False,
        whitespace_pattern=given.whitespace_pattern,
    )
    names = list(form.given)
    return form, f"structured_outputs.{names[0]}" if len(names) == 1 else "structured_outputs"
