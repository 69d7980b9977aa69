"""Reads what requests of every dialect have in common: sampling fields, identity, the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.output_limits import RepetitionDetection
from triptych.types.sampling import FieldKind, OutputKind, fields_of
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import RequestHead
from triptych_services.frontend.http.body import to_violations, unsupported_paths
from triptych_services.frontend.http.generation_body import (
    COMMON_SAMPLING_FIELDS,
    AbortRequest,
    GenerationBody,
    StructuredOutputsBody,
)
from triptych_services.frontend.requests.identity import unique_request_id
from triptych_services.frontend.requests.parse import why_not_request_id
from triptych_services.frontend.requests.raw import RawRequest

REQUEST_ID_HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Request-Timeout-S"
"""The header by which a client bounds the time of a request."""
_SECONDS = TypeAdapter(float)

REFUSED_PROMPT = "-"
"""Replaces a prompt that `violations` refuse already, so that it is not reported missing as well."""

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


def timeout_of(request: Request) -> float | None:
    """Return the seconds that a request may take by its header, or None where it has none.

    Raises:
        InvalidRequest: It is no number.
    """
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return _SECONDS.validate_python(text)
    except ValidationError as error:
        raise InvalidRequest(
            to_violations([{**detail, "loc": (TIMEOUT_HEADER,)} for detail in error.errors()])
        ) from None


def base_request(body: GenerationBody, form: Form, *, label: str, deadline_s: float | None) -> RawRequest:
    """Return the request without its prompt and the fields that APIs name differently.

    Args:
        label: The X-Request-Id. Proxies give one to all calls of a user's request, so it is not unique.
    """
    path, names = REQUEST_ID_HEADER, [label]
    if body.request_id is not None:
        path, label, names = "request_id", body.request_id, [label, body.request_id]
    why_not_label = why_not_request_id(label)
    bad_label = [] if why_not_label is None else [FieldViolation(path, why_not_label)]
    paths = {"deadline_s": TIMEOUT_HEADER, "structured_outputs": form.path}
    if not body.tenant:
        paths["tenant"] = "user"
    return RawRequest(
        api="http",
        prompt=None,
        head=RequestHead(
            "" if bad_label else unique_request_id(label),
            body.priority or 0,
            body.tenant or body.user or "",
            body.cache_salt or "",
        ),
        client_names=tuple(names),
        model=body.model or "",
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        sampling={**sampling_fields(body), "structured_outputs": form.form},
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        keeps_beginning=body.truncation_side == "right",
        deadline_s=deadline_s,
        paths=paths,
        violations=(*body.violations, *bad_label, *form.violations),
        unsupported=tuple(unsupported_paths(body)),
    )


def names_to_abort(body: AbortRequest) -> list[str]:
    """Return the names of the requests to abort.

    Raises:
        InvalidRequest: All that is wrong with the body.
    """
    violations = list(body.violations)
    if not body.request_ids and not violations:
        violations.append(FieldViolation("request_ids", "none are given; send at least 1"))
    if violations:
        raise InvalidRequest(violations)
    return body.request_ids or []


def sampling_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the sampling fields that all bodies have, by name; None where the client left one out."""
    values = {name: getattr(body, name) for name in COMMON_SAMPLING_FIELDS}
    values["seed"] = _seed(body.seed)
    if (repetition := values["repetition_detection"]) is not None:
        values["repetition_detection"] = RepetitionDetection(**repetition.model_dump())
    for name in fields_of(FieldKind.STRINGS, FieldKind.WORDS):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    return values


def _seed(seed: int | None) -> int | None:
    """Return a seed as the parser takes it: 64 bits without a sign. -1 means none in many clients."""
    if seed is None or seed == -1:
        return None
    return seed + (1 << 64) if -(1 << 63) <= seed < 0 else seed


def is_refused(body: GenerationBody, name: str) -> bool:
    """Return whether a field was left out of a body for what is wrong with it."""
    return any(violation.field.partition("[")[0] == name for violation in body.violations)
