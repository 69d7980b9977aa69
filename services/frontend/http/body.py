"""JSON bodies checked field by field: what is wrong with one field never hides what is wrong with another."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from triptych.errors import FeatureDisabled, FieldViolation, InvalidRequest
from triptych_services.frontend.http.fields import is_kind
from triptych_services.frontend.requests.json_text import read_json_in_parts

MAX_VIOLATIONS = 64  # reported of one body; a client needs no more to see what is wrong
MAX_FIELDS = 256  # of one JSON object; the largest that the API knows has a quarter of that
_MAX_SUGGESTIONS = 3  # unknown names that are compared with all that are known, which takes 1 ms each
_NO_SUCH_FIELD = "there is no such field"
_NOT_SERVED = "x-not-served"
_WORDS = {
    "missing": "is missing",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "must_be": "",
    "too_many_fields": "",
}


class ClientGone(Exception):
    """The client has closed its connection and reads no answer."""


class JsonObject(BaseModel):
    """A JSON object inside a body: types as JSON has them, no conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_too_many_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Before pydantic builds an error for each of a million unknown fields."""
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise PydanticCustomError(
                "too_many_fields",
                "{count} fields are above the limit {limit}",
                {"count": len(data), "limit": MAX_FIELDS},
            )
        if info.context is not None and info.context.drops_unknown and cls.model_config["extra"] == "forbid":
            known = _names_of(cls)
            return {name: value for name, value in data.items() if name in known}
        return data

    @property
    def unserved_kind(self) -> str | None:
        """The kind of this part where it is one that the API knows and this version does not serve."""
        return None


class Unserved(JsonObject):
    """A part of a kind that the API knows and this version does not serve."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def unserved_kind(self) -> str | None:
        return self.type


@dataclass(slots=True)
class LeaveOutUnknown:
    """Context of a validation that leaves out fields that are not known, where others refuse them."""

    drops_unknown: bool = False
    """Set when the first ones were found, and reported: the others are dropped without a finding each."""


@functools.cache
def _names_of(kind: type[JsonObject]) -> frozenset[str]:
    """Return the names that the fields of a part have in JSON."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class Body(JsonObject):
    """The JSON object of a request.

    Validation never fails: a wrong field counts as left out and is listed in `violations`, so that the
    rest can still be checked and everything is reported at once. Every field has a default, therefore.
    """

    _violations: tuple[FieldViolation, ...] = PrivateAttr(default=())
    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        return self._violations

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Paths of the fields that were left out, since the API has no such fields and does not refuse them."""
        return self._unknown

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_is_right(cls, data: Any, handler: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or len(data) > MAX_FIELDS:
            return handler(data)
        unknown = [name for name in data if name not in cls.model_fields]
        right = {name: value for name, value in data.items() if name in cls.model_fields}
        violations: list[FieldViolation] = []
        leaves_out: LeaveOutUnknown | None = info.context
        if leaves_out is None:
            violations = _refuse_unknown(unknown, cls.model_fields)
            unknown = []
        try:
            body = handler(right)
        except ValidationError as error:
            details: Sequence[Any] = error.errors(include_url=False, include_context=False)
            if leaves_out is not None:
                unknown += _leave_out_unknown(right, details)
                leaves_out.drops_unknown = True
                details = _errors_of(handler, right)
            violations += to_violations(details)
            wrong = {detail["loc"][0] for detail in details}
            body = handler({name: value for name, value in right.items() if name not in wrong})
        body._violations = tuple(violations[:MAX_VIOLATIONS])
        body._unknown = tuple(name[:80] for name in unknown[:MAX_VIOLATIONS])
        return body


def _leave_out_unknown(right: dict[str, Any], details: Sequence[Mapping[str, Any]]) -> list[str]:
    """Remove the fields of parts that are not known; return their paths."""
    paths = []
    for detail in details:
        if detail["type"] == "extra_forbidden":
            *parents, name = detail["loc"]
            part: Any = right
            for step in parents:
                part = part if is_kind(step) else part[step]
            del part[name]
            paths.append(to_path(detail["loc"]))
    return paths


def _errors_of(handler: Any, right: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
    try:
        handler(right)
    except ValidationError as error:
        return error.errors(include_url=False, include_context=False)
    return ()


def not_served(*accepted: Any) -> Any:
    """Declare a field that is known but not supported: any value but null and `accepted` is refused by name."""
    also = f" (null and {', '.join(map(json.dumps, accepted))} are accepted)" if accepted else ""
    return Field(
        default=None,
        description=f"Not served yet: leave it out{also}.",
        json_schema_extra={"enum": [None, *accepted], _NOT_SERVED: True},
    )


def ignored(alias: str | None = None) -> Any:
    """A field that clients send, perhaps under another name, and that has no bearing on the answer."""
    return Field(default=None, alias=alias, description="Accepted and ignored.")


def unsupported_paths(part: JsonObject, path: str = "") -> Iterator[str]:
    """Yield the paths of what the client has set and this version does not support, in the order of the fields.

    Args:
        path: Of the part in the body, with a dot at its end.
    """
    given, accepted = part.model_fields_set, _name_to_accepted(type(part))
    for name in type(part).model_fields:
        if name not in given:
            continue
        value = getattr(part, name)
        if name in accepted:
            if not _is_one_of(value, accepted[name]):
                yield f"{path}{name}"
        elif isinstance(value, JsonObject):
            yield from _unsupported_part(value, f"{path}{name}")
        elif isinstance(value, list) and value and isinstance(value[0], JsonObject):
            for number, entry in enumerate(value):
                if not isinstance(entry, JsonObject):  # a list may have texts beside objects
                    continue
                yield from _unsupported_part(entry, f"{path}{name}[{number}]")


def _is_one_of(value: Any, accepted: Sequence[Any]) -> bool:
    """Compare as JSON does, where 0 is not false."""
    return any(type(value) is type(each) and value == each for each in accepted)


def _unsupported_part(part: JsonObject, path: str) -> Iterator[str]:
    kind = part.unserved_kind
    if kind is None:
        yield from unsupported_paths(part, f"{path}.")
    else:
        yield f"{path}.{kind[:80]}"


def refuse_unsupported(body: JsonObject) -> None:
    """Refuse a body that sets what this version does not support.

    Raises:
        FeatureDisabled: Names all of it.
    """
    if paths := list(unsupported_paths(body)):
        raise FeatureDisabled(paths, "this version does not serve it yet; leave it out")


@functools.cache
def _name_to_accepted(kind: type[JsonObject]) -> dict[str, Sequence[Any]]:
    """Return the unsupported fields, with the values that are accepted anyway."""
    extras = {name: info.json_schema_extra for name, info in kind.model_fields.items()}
    return {
        name: cast(Sequence[Any], extra["enum"])
        for name, extra in extras.items()
        if isinstance(extra, dict) and _NOT_SERVED in extra
    }


def must_be(expected: str) -> WrapValidator:
    """One message for a union, instead of one per branch."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("must_be", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(check)


def to_violations(details: Sequence[Mapping[str, Any]]) -> list[FieldViolation]:
    """Pydantic's findings in our form: paths as clients write them, the value beside its limit."""
    return [FieldViolation(to_path(detail["loc"]), _describe(detail)) for detail in details[:MAX_VIOLATIONS]]


def to_path(loc: Sequence[int | str]) -> str:
    """("messages", 2, "role") -> `messages[2].role`."""
    path = ""
    for step in loc:
        if is_kind(step):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _refuse_unknown(names: Sequence[str], fields: Mapping[str, Any]) -> list[FieldViolation]:
    """Return what is wrong with names that no field has; the first of them may come with the name that is meant."""
    violations = []
    for number, name in enumerate(names[:MAX_VIOLATIONS]):
        close = difflib.get_close_matches(name[:80], fields, n=1) if number < _MAX_SUGGESTIONS else []
        why = f"{_NO_SUCH_FIELD}; did you mean {close[0]}?" if close else _NO_SUCH_FIELD
        violations.append(FieldViolation(name[:80], why))
    return violations


_LIMITS = {"greater_than_equal": "below", "less_than_equal": "above"}
"""Kind of a finding of pydantic's, whose message ends with the limit -> where the value is."""


def _describe(detail: Mapping[str, Any]) -> str:
    kind, message = detail["type"], detail["msg"]
    if kind in _WORDS:
        return _WORDS[kind] or message
    if kind == "extra_forbidden":
        return _NO_SUCH_FIELD
    value = _shown(detail["input"])
    if kind in _LIMITS:
        return f"{value} is {_LIMITS[kind]} the limit {message.rpartition(' ')[2]}"
    return f"{value} is refused: {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """The value, if it is short to write."""
    if isinstance(value, str):
        return repr(value[:60]) + ("…" if len(value) > 60 else "")
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:80]
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


B = TypeVar("B", bound=Body)
T = TypeVar("T")


def read_body(
    data: bytes, kind: type[B], convert: Callable[[B], T], *, refuses_unknown: bool
) -> tuple[T, tuple[str, ...]]:
    """Return what `convert` makes of a body, and the paths of the unknown fields that were left out.

    Raises:
        InvalidRequest: The body is no JSON object. Errors of its fields are in `Body.violations`.
    """
    body = _parse(data, kind, None if refuses_unknown else LeaveOutUnknown())
    return convert(body), body.unknown_fields


def _parse(data: bytes, kind: type[B], context: LeaveOutUnknown | None) -> B:
    try:
        value = read_json_in_parts(data.decode(json.detect_encoding(data), "surrogatepass"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # of a string that does not end
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest("", f"the body is not valid JSON: {what} at {where}") from None
    except ValueError as error:
        raise InvalidRequest("", f"the body cannot be read: {error}") from None
    try:
        return kind.model_validate(value, context=context)
    except ValidationError as error:
        raise InvalidRequest([_not_an_object(error)]) from None


def _not_an_object(error: ValidationError) -> FieldViolation:
    (detail, *_) = error.errors(include_url=False, include_context=False)
    if detail["type"] == "too_many_fields":
        return FieldViolation("", f"the body has too many fields: {detail['msg']}")
    if detail["loc"]:
        return to_violations([detail])[0]
    return FieldViolation("", "the body must be a JSON object, sent with Content-Type: application/json")
