"""JSON bodies checked field by field: what is wrong with one field never hides what is wrong with another."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from triptych.errors import FieldViolation

MAX_VIOLATIONS = 64  # reported of one body; a client needs no more to see what is wrong
MAX_FIELDS = 256  # of one JSON object; the largest that the API knows has a quarter of that
_NOT_SERVED = "x-not-served"
_WORDS = {
    "missing": "is missing",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "either": "",
    "heap": "",
}


class Part(BaseModel):
    """A JSON object inside a body: types as JSON has them, no conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_heaps(cls, data: Any) -> Any:
        """Before pydantic builds an error for each of a million unknown fields."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise PydanticCustomError(
                "heap",
                "{count} fields are above the limit {limit}",
                {"count": len(data), "limit": MAX_FIELDS},
            )
        return data


class Body(Part):
    """The JSON object of a request.

    It always builds: a field that is wrong counts as left out and stands in `violations`, so that the
    rest can still be checked and everything is reported at once. Every field has a default, therefore.
    """

    _violations: tuple[FieldViolation, ...] = PrivateAttr(default=())

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        return self._violations

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_is_right(cls, data: Any, handler: Any) -> Any:
        if not isinstance(data, dict) or len(data) > MAX_FIELDS:
            return handler(data)
        violations = [
            FieldViolation(name[:80], _no_such_field(name, cls.model_fields))
            for name in data
            if name not in cls.model_fields
        ]
        right = {name: value for name, value in data.items() if name in cls.model_fields}
        try:
            body = handler(right)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            violations += to_violations(details)
            wrong = {detail["loc"][0] for detail in details}
            body = handler({name: value for name, value in right.items() if name not in wrong})
        body._violations = tuple(violations[:MAX_VIOLATIONS])
        return body


def not_served(*accepted: Any) -> Any:
    """A field that the API knows and nobody has built: any value but null and `accepted` is refused by name."""
    also = f" (null and {', '.join(map(json.dumps, accepted))} are accepted)" if accepted else ""
    return Field(
        default=None,
        description=f"Not served yet: leave it out{also}.",
        json_schema_extra={"enum": [None, *accepted], _NOT_SERVED: True},
    )


def ignored() -> Any:
    """A field that clients send and that has no bearing on the answer."""
    return Field(default=None, description="Accepted and ignored.")


def unsupported_fields(part: Part) -> list[str]:
    """Names of the fields that the client set although nobody has built them."""
    given = part.model_fields_set
    return [
        name
        for name, accepted in _name_to_accepted(type(part)).items()
        if name in given and getattr(part, name) not in accepted
    ]


@functools.cache
def _name_to_accepted(kind: type[Part]) -> dict[str, Sequence[Any]]:
    """The fields that nobody has built, with the values that are accepted all the same."""
    extras = {name: info.json_schema_extra for name, info in kind.model_fields.items()}
    return {
        name: cast(Sequence[Any], extra["enum"])
        for name, extra in extras.items()
        if isinstance(extra, dict) and _NOT_SERVED in extra
    }


def either(expected: str) -> WrapValidator:
    """One message for a union, instead of one per branch."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("either", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(check)


def to_violations(details: Sequence[Mapping[str, Any]]) -> list[FieldViolation]:
    """Pydantic's findings in our form: paths as clients write them, the value beside its limit."""
    return [FieldViolation(to_path(detail["loc"]), _describe(detail)) for detail in details[:MAX_VIOLATIONS]]


def to_path(loc: Sequence[int | str]) -> str:
    """("messages", 2, "role") -> `messages[2].role`."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _no_such_field(name: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name[:80], fields, n=1)
    return f"there is no such field; did you mean {close[0]}?" if close else "there is no such field"


def _describe(detail: Mapping[str, Any]) -> str:
    kind, message = detail["type"], detail["msg"]
    if kind in _WORDS:
        return _WORDS[kind] or message
    if kind == "extra_forbidden":
        return "there is no such field"
    return f"{_shown(detail['input'])} is refused: {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """The value, if it is short to write."""
    if isinstance(value, str):
        return repr(value[:60]) + ("…" if len(value) > 60 else "")
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:80]
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
