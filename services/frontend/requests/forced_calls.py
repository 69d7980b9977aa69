"""Calls of tools that a request demands: the form that the answer is held to, and how it is read.

The answer is a JSON list, whatever the model's own way of calling is:

    [{"name": "add", "parameters": {"a": 1}}, …]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.frontend.requests.raw import RawChat
from triptych.text.tool_formats import JSON_LIST
from triptych.types.structured import StructuredOutputs

FORCED_FORMAT = JSON_LIST
_DEFINITIONS = ("$defs", "definitions")


def forced_form(chat: RawChat) -> StructuredOutputs | None:
    """Return the form of an answer that has to call tools, or None if it may do without.

    Args:
        chat: A conversation whose tools have been checked.
    """
    if not chat.demands_calls:
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(chat.tools):
        function = tool["function"]
        if chat.tool_choice in ("required", function["name"]):
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            calls.append(_call_of(function["name"], _hoisted(parameters, f"tool{number}_", definitions)))
    has_one = chat.tool_choice != "required" or not chat.parallel_tool_calls
    schema = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        **({"maxItems": 1} if has_one else {}),
        **({"$defs": definitions} if definitions else {}),
    }
    return StructuredOutputs(json=schema)


def _call_of(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _hoisted(schema: Mapping[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose definitions have moved to `definitions`, since references begin at the whole schema."""
    moved = {f"#/{key}/{name}": f"{prefix}{name}" for key in _DEFINITIONS for name in schema.get(key) or ()}
    for key in _DEFINITIONS:
        for name, definition in (schema.get(key) or {}).items():
            definitions[f"{prefix}{name}"] = _redirected(definition, moved)
    return {name: _redirected(value, moved) for name, value in schema.items() if name not in _DEFINITIONS}


def _redirected(value: Any, moved: Mapping[str, str]) -> Any:
    """Return a part of a schema with its references to what has moved."""
    if isinstance(value, Mapping):
        return {
            name: f"#/$defs/{moved[part]}"
            if name == "$ref" and isinstance(part, str) and part in moved
            else _redirected(part, moved)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [_redirected(entry, moved) for entry in value]
    return value
