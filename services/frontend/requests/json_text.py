"""Reads JSON that clients wrote: with a bound on its depth, and letting other threads run meanwhile."""

from __future__ import annotations

import json
from json import decoder
from typing import Any

MAX_DEPTH = 64
"""Lists and objects inside of each other. What is deeper would overflow the stack of code that walks it."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is no JSON, or deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Check how deep a value is that JSON can spell.

    Raises:
        ValueError: It is deeper than `MAX_DEPTH`.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            entry
            for container in level
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, (dict, list))
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"its lists and objects are nested deeper than the limit {MAX_DEPTH}"


def read_json_in_parts(text: str) -> Any:
    """Do what `read_json` does, but let other threads run between the entries of top-level lists and objects.

    `json.loads` is one call into C, which holds the interpreter's lock to its end: 20 ms for 131,072 token ids.
    """
    try:
        value = _loads_in_parts(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


_scan_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # in C; for nested values


def _scan(text: str, index: int) -> tuple[Any, int]:
    if text[index : index + 1] == "[":
        return decoder.JSONArray((text, index + 1), _scan)  # type: ignore[attr-defined]
    return _scan_once(text, index)


def _loads_in_parts(text: str) -> Any:
    start = decoder.WHITESPACE.match(text, 0).end()  # type: ignore[attr-defined]
    try:
        if text[start : start + 1] == "{":
            value, end = decoder.JSONObject((text, start + 1), True, _scan, None, None)  # type: ignore[attr-defined]
        else:
            value, end = _scan(text, start)
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None
    end = decoder.WHITESPACE.match(text, end).end()  # type: ignore[attr-defined]
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value
