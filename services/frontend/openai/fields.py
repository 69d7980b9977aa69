"""Types of fields in bodies, with what the document says of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, ValidationError, WrapValidator
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


TokenId = Annotated[int, schema(minimum=0)]
TokenIds = Annotated[list[TokenId], FirstOnly(), WrapValidator(_token_ids)]
Text = Annotated[str, schema(minLength=1)]
