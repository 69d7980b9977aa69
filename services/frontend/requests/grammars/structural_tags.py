"""Reads structural tags: free text in which certain beginnings force a section of JSON, as vLLM writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych_services.frontend.requests.json_text import read_json

_FORMS = (
    'send {"structures": [{"begin": …, "schema": …, "end": …}], "triggers": […]}, '
    "or a `format` of the type triggered_tags"
)


def read_structural_tags(text: str) -> list[dict[str, Any]]:
    """Return the tags in the words of `grammar_process.py`.

    Raises:
        ValueError: They are not understood, or not served; says why.
    """
    try:
        value = read_json(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is not an object: {_FORMS}")
    format = value.get("format")
    if format is None:
        triggers, sections = value.get("triggers"), value.get("structures")
    elif isinstance(format, dict) and format.get("type") == "triggered_tags":
        for name in ("at_least_one", "stop_after_first", "excludes"):
            if format.get(name):
                raise ValueError(f"format.{name} is not served; leave it out")
        triggers, sections = format.get("triggers"), format.get("tags")
    else:
        raise ValueError(f"has a format that is not served: {_FORMS}")
    if not isinstance(triggers, list) or not isinstance(sections, list) or not triggers or not sections:
        raise ValueError(f"has no triggers or no tags: {_FORMS}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("has a trigger that is no text, or empty")
    known = set(triggers)
    lengths = sorted({len(trigger) for trigger in known}, reverse=True)
    return [_read_tag(section, known, lengths, number) for number, section in enumerate(sections)]


def _read_tag(section: Any, triggers: set[str], lengths: list[int], number: int) -> dict[str, Any]:
    where = f"tag {number}"
    if not isinstance(section, dict):
        raise ValueError(f"{where} is not an object")
    begin, end, schema = section.get("begin"), section.get("end"), _schema_of(section, where)
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"{where} needs the texts begin and end")
    # Not trigger by trigger: there may be tens of thousands, and as many sections.
    fitting = (begin[:length] for length in lengths if begin[:length] in triggers)
    trigger = next(fitting, None)
    if trigger is None:
        raise ValueError(f"{where} begins with {begin[:60]!r}, and so does none of the triggers")
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end}


def _schema_of(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = section.get("content")
    if isinstance(content, dict):
        if content.get("type") != "json_schema":
            raise ValueError(
                f"{where}: a content of the type {content.get('type')!r} is not served; json_schema is"
            )
        schema = content.get("json_schema")
    else:
        schema = section.get("schema")
    if not isinstance(schema, dict):
        raise ValueError(f"{where} needs a JSON schema")
    return schema
