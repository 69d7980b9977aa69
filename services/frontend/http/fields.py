"""Types of fields in bodies, with what the document says of them."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from triptych.types.sampling import SAMPLING_FIELDS


class FirstOnly(FailFast):
    """A list stops at its first wrong entry: a million wrong ones must not become a million errors."""

    __hash__ = object.__hash__  # pydantic's own has none, and unions of types need one


def schema(**keywords: Any) -> FieldInfo:
    """Return keywords of JSON Schema that describe in the document what the parser checks."""
    return Field(json_schema_extra={name: value for name, value in keywords.items() if value is not None})


def limits(name: str, *, minimum: int | None = None) -> FieldInfo:
    """Return the range of a sampling field for the document.

    Args:
        minimum: The least value, where the endpoint takes fewer than the field has.
    """
    spec = SAMPLING_FIELDS[name]
    low = spec.low if minimum is None else minimum
    return schema(**{"exclusiveMinimum" if spec.excludes_low else "minimum": low}, maximum=spec.high)


def _integral(value: Any) -> Any:
    """Turn 10.0 into an integer: JSON has one kind of number, and some languages write no other."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _token_ids(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:  # looking at each of many ids costs, so only now
        if not isinstance(value, list) or float not in set(map(type, value)):
            raise
        return handler([_integral(entry) for entry in value])


Integral = BeforeValidator(_integral)


def exactly_one_of(*names: str) -> dict[str, Any]:
    """Say in the document that one of these fields is given, neither as null nor as false."""
    given = {"not": {"enum": [None, False]}}
    return {"oneOf": [{"required": [name], "properties": {name: given}} for name in names]}


def document_as(*required: str) -> ConfigDict:
    """Say in the document that these fields are needed. The parser reports their absence: a body always builds."""

    def require(document: dict[str, Any]) -> None:
        document["required"] = list(required)
        for name in required:
            field = document["properties"][name]
            field.pop("default", None)
            if "anyOf" in field:
                field["anyOf"] = [choice for choice in field["anyOf"] if choice != {"type": "null"}]

    return ConfigDict(json_schema_extra=require)


def kind(name: str) -> Tag:
    """Mark a member of a union that `by_kind` chooses: `text`, `list`, `other`, or the kind of an object.

    It is a step in the places of pydantic's findings; the parentheses distinguish it from a field of the body.
    """
    return Tag(f"({name})")


def is_kind(step: int | str) -> bool:
    """Return whether a step in the place of a finding is the mark of a union's member."""
    return isinstance(step, str) and step.startswith("(")


def by_kind(expected: str, *types: str, key: str = "type", default: str = "", **kinds: str) -> Discriminator:
    """Choose the member of a union, so that only its own findings are reported.

    Args:
        expected: Completes "must be …" where there is no such member.
        types: Types of objects that are their kinds as well. Objects of other types are of the kind `other`.
        key: The field that has the type of an object.
        default: The type of objects that leave it out.
        kinds: Types of objects -> their kinds, where they differ.
    """
    kind_of = {**{type: type for type in types}, **kinds}

    def find(value: Any) -> str | None:
        if isinstance(value, str):
            return "(text)"
        if isinstance(value, list):
            return "(list)"
        type = (value.get(key) or default) if isinstance(value, dict) else None
        if not isinstance(type, str) or not type:
            return None
        return f"({kind_of.get(type, 'other')})"

    return Discriminator(find, custom_error_type="either", custom_error_message=f"must be {expected}")


TokenId = Annotated[int, schema(minimum=0)]
TokenIds = Annotated[list[TokenId], FirstOnly(), WrapValidator(_token_ids)]
Text = Annotated[str, schema(minLength=1)]
Name = Annotated[str, MinLen(1)]
"""A name that the parser does not look at again."""
TruncatedLength = Annotated[
    int, Integral, schema(anyOf=[{"const": -1}, {"minimum": 1, "maximum": (1 << 31) - 1}])
]
"""Tokens to which a text is cut; -1: as many as have room."""
