"""One flag per sampling field, derived from the one table in `triptych.types.sampling`.

Only the form of a value is checked here, where the server could not see it. Ranges are the server's, which names all
violations at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triptych.cli.access import read_text
from triptych.errors import ConfigError
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingField

_METAVARS = {  # other kinds are objects, in JSON
    FieldKind.INTEGER: "N",
    FieldKind.NUMBER: "X",
    FieldKind.STRINGS: "TEXT",
    FieldKind.WORDS: "TEXT",
    FieldKind.TOKEN_IDS: "ID,ID,…",
    FieldKind.BIASES: "ID:X,…",
}
_REPEATED = (FieldKind.STRINGS, FieldKind.WORDS)
_BOOLEANS = {"true": True, "false": False}
_FORMS = {
    "json_schema": ("json", "FILE", "JSON that conforms to this schema: a file, or the schema itself"),
    "json_object": ("json_object", "", "any JSON object"),
    "regex": ("regex", "REGEX", "a text that this regular expression matches as a whole"),
    "choice": ("choice", "TEXT", "one of these texts; to be repeated"),
    "grammar": ("grammar", "FILE", "a text of this context-free grammar, Lark or GBNF"),
}
"""Flag -> field of `StructuredOutputs`, metavar, meaning."""

SAMPLING_NAMES = tuple(
    name
    for name, field in SAMPLING_FIELDS.items()
    if field.kind not in (FieldKind.STRUCTURED, FieldKind.OUTPUT_KIND)
)
"""Fields that have a flag each, and that `set_from_text` takes."""


def add_sampling_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = SAMPLING_NAMES) -> None:
    """Add a flag for each of these fields; what is not given is the model's own, then the server's default."""
    group = parser.add_argument_group("sampling", "What is not given is left to the model and the server.")
    for name in names:
        _add_flag(group, name, SAMPLING_FIELDS[name])


def add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that force the answer into a form, at most one of which may be given."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    for flag, (_, metavar, text) in _FORMS.items():
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true", "default": None}
        if flag == "choice":
            kind["action"] = "append"
        group.add_argument(f"--{flag.replace('_', '-')}", help=text, **kind)


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given, by name.

    Raises:
        ConfigError: A schema or a grammar cannot be read; names the flag.
    """
    given = {name: getattr(arguments, name, None) for name in SAMPLING_NAMES}
    for flag, (form, _, _) in _FORMS.items():
        if (value := getattr(arguments, flag, None)) is not None:
            given["structured_outputs"] = {form: _read_form(flag, value)}
    return {name: value for name, value in given.items() if value is not None}


def parse_field(name: str, text: str) -> Any:
    """Return the value that a user means by `text`, of a field of `SAMPLING_NAMES`.

    Raises:
        ValueError: Values of the field have another form; says which one.
    """
    kind = SAMPLING_FIELDS[name].kind
    try:
        return _parse(kind, text)
    except (ValueError, KeyError):
        form = "true or false" if kind is FieldKind.BOOLEAN else _METAVARS.get(kind, "JSON")
        raise ValueError(f"{name}: {text!r} is no value of the form {form}") from None


def _add_flag(group: argparse._ArgumentGroup, name: str, field: SamplingField) -> None:
    flag, text = f"--{name.replace('_', '-')}", field.help.replace("%", "%%")
    if field.kind is FieldKind.BOOLEAN:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif field.kind in _REPEATED:
        text += " May be repeated."
        group.add_argument(flag, action="append", metavar=_METAVARS.get(field.kind, "JSON"), help=text)
    else:
        group.add_argument(flag, type=_Parser(name), metavar=_METAVARS.get(field.kind, "JSON"), help=text)


class _Parser:
    """Parses a flag's value for argparse, which shows the error's text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, text: str) -> Any:
        try:
            return parse_field(self._name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _parse(kind: FieldKind, text: str) -> Any:
    match kind:
        case FieldKind.INTEGER:
            return int(text)
        case FieldKind.NUMBER:
            return float(text)
        case FieldKind.BOOLEAN:
            return _BOOLEANS[text.lower()]
        case FieldKind.STRINGS | FieldKind.WORDS:
            return [json.loads(text) if text.startswith('"') else text]
        case FieldKind.TOKEN_IDS:
            return [int(word) for word in _split(text)]
        case FieldKind.BIASES:
            pairs = (word.split(":") for word in _split(text))
            return {int(token_id): float(bias) for token_id, bias in pairs}
    return json.loads(text)


def _split(text: str) -> Iterable[str]:
    return re.split(r"[,\s]+", text.strip())


def _read_form(flag: str, value: Any) -> Any:
    if flag == "json_schema":
        text = value if value.lstrip().startswith("{") else read_text(Path(value), "--json-schema")
        try:
            return json.dumps(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"--json-schema: is no JSON: {error}") from None
    return read_text(Path(value), "--grammar") if flag == "grammar" else value
