"""Rewrites JSON schemas as clients' libraries write them into what the compiler of grammars takes.

What means the same is rewritten, what constrains nothing is left out. A lenient schema also loses what cannot be
enforced; the answer then says what that was. docs/adr/0050. Used by `grammar_process`: standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords that hold lists of schemas."""
_SINGLES = (
    "items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
    "contains", "not", "if", "then", "else",
)  # fmt: skip
"""Keywords that hold a schema."""
_COMBINATORS = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not")
_NOT_ENFORCED = (
    "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords of which a lenient schema loses what could not be rewritten."""
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that the compiler knows. JSON Schema takes any other for a note to the reader."""

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 0001 to 9999
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_TIME_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats of which the compiler lets through more than readers take: the second 60, the year 0."""
_GAP = Decimal("1e-6")


class NormalSchema(NamedTuple):
    """A schema as the compiler takes it."""

    schema: Any
    not_enforced: tuple[str, ...]
    """Paths of what it lacks, like `properties.tags.uniqueItems`. Empty if nothing was lost."""


def normalize(schema: Any, *, is_strict: bool, can_match: Callable[[str], bool]) -> NormalSchema:
    """Return a schema in words that the compiler takes.

    Args:
        is_strict: Leave in what cannot be enforced, so that the compiler refuses it.
        can_match: Whether a regular expression can be enforced.
    """
    normalizer = _Normalizer(schema, is_strict, can_match)
    return NormalSchema(normalizer.rewrite(schema, ""), tuple(normalizer.not_enforced))


class _Normalizer:
    """Rewrites one schema."""

    def __init__(self, root: Any, is_strict: bool, can_match: Callable[[str], bool]) -> None:
        self._is_strict = is_strict
        self._can_match = can_match
        self._anchors, self._dynamic_anchors = _find_anchors(root)
        self.not_enforced: list[str] = []

    def rewrite(self, schema: Any, path: str) -> Any:
        """Return a schema, or a part of one, rewritten.

        Args:
            path: Of the part, with a dot at its end.
        """
        if not isinstance(schema, Mapping):
            return schema
        new = dict(schema)
        self._rewrite_references(new, path)
        _drop_notes(new)
        _rewrite_bounds(new)
        _rewrite_tuple(new)
        _rewrite_times(new)
        _rewrite_property_names(new)
        _rewrite_unevaluated(new)
        if not self._is_strict:
            self._loosen(new, path)
        for name in _MAPS:
            if isinstance(new.get(name), Mapping):
                new[name] = {
                    key: self.rewrite(value, f"{path}{name}.{key}.") for key, value in new[name].items()
                }
        for name in _LISTS:
            if isinstance(new.get(name), list):
                parts = new[name] if name in ("allOf", "prefixItems") else _without_impossible(new[name])
                new[name] = [
                    self.rewrite(part, f"{path}{name}[{index}].") for index, part in enumerate(parts)
                ]
        for name in _SINGLES:
            if name in new:
                new[name] = self.rewrite(new[name], f"{path}{name}.")
        return new

    def _rewrite_references(self, new: dict[str, Any], path: str) -> None:
        """Turn names of places into paths, which are all that the compiler follows."""
        new.pop("$anchor", None)
        new.pop("$dynamicAnchor", None)
        dynamic = new.get("$dynamicRef")
        if (
            isinstance(dynamic, str)
            and dynamic.removeprefix("#") in self._dynamic_anchors
            and "$ref" not in new
        ):
            del new["$dynamicRef"]
            new["$ref"] = self._dynamic_anchors[dynamic.removeprefix("#")]
        reference = new.get("$ref")
        if not isinstance(reference, str):
            return
        if reference.startswith("#") and reference[1:] in self._anchors:
            new["$ref"] = self._anchors[reference[1:]]
        elif not reference.startswith("#") and not self._is_strict:
            self._lose(new, "$ref", path)

    def _loosen(self, new: dict[str, Any], path: str) -> None:
        for name in _NOT_ENFORCED:
            if name in new:
                self._lose(new, name, path)
        pattern = new.get("pattern")
        if isinstance(pattern, str) and not self._can_match(pattern):
            self._lose(new, "pattern", path)

    def _lose(self, new: dict[str, Any], name: str, path: str) -> None:
        del new[name]
        self.not_enforced.append(f"{path}{name}")


def _find_anchors(root: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the named places of a schema, and those that only a dynamic reference may mean, by their paths.

    A dynamic anchor that is there twice depends on how it is reached, and is left out.
    """
    anchors: dict[str, str] = {}
    dynamic: dict[str, list[str]] = {}
    for part, pointer in _parts_of(root, "#"):
        if isinstance(name := part.get("$anchor"), str):
            anchors[name] = pointer
        if isinstance(name := part.get("$dynamicAnchor"), str):
            dynamic.setdefault(name, []).append(pointer)
    single = {name: pointers[0] for name, pointers in dynamic.items() if len(pointers) == 1}
    return {**single, **anchors}, single


def _parts_of(schema: Any, pointer: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each schema inside of one, and its JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    yield schema, pointer
    for name, value in schema.items():
        where = f"{pointer}/{name}"
        if name in _MAPS and isinstance(value, Mapping):
            for key, part in value.items():
                yield from _parts_of(part, f"{where}/{key.replace('~', '~0').replace('/', '~1')}")
        elif name in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _parts_of(part, f"{where}/{index}")
        elif name in _SINGLES:
            yield from _parts_of(value, where)


def _drop_notes(new: dict[str, Any]) -> None:
    """Leave out what says nothing about the values."""
    if new.get("format") not in _FORMATS:
        new.pop("format", None)
    if new.get("uniqueItems") is False or (
        isinstance(most := new.get("maxItems"), int) and most <= 1 and "uniqueItems" in new
    ):
        del new["uniqueItems"]
    if new.get("not") is False:
        del new["not"]
    for name in ("unevaluatedProperties", "unevaluatedItems"):
        if new.get(name) is True or new.get(name) == {}:
            del new[name]


def _rewrite_bounds(new: dict[str, Any]) -> None:
    """Say exclusive bounds as the compiler keeps them.

    It lets -1 pass as a number of -1.5 up to -1 exclusively: an integer as the bound of a range inside of one integer.
    The range is made smaller by a millionth there. In draft 4 the other keyword has the bound.
    """
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(new.get(exclusive), bool):
            is_exclusive = new.pop(exclusive)
            if is_exclusive and inclusive in new:
                new[exclusive] = new.pop(inclusive)
    kinds = new.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    low, high = _bound(new, "minimum", max), _bound(new, "maximum", min)
    if low is None or high is None or low >= high or _floor(low) + 1 < high:
        return
    if low == _floor(low) and high == _floor(high):
        return
    gap = min(_GAP, (high - low) / 1000)
    for name, bound, nearer in (("exclusiveMinimum", low, low + gap), ("exclusiveMaximum", high, high - gap)):
        if _decimal(new.get(name)) == bound and bound == _floor(bound):
            del new[name]
            new["minimum" if name == "exclusiveMinimum" else "maximum"] = float(nearer)


def _bound(
    schema: Mapping[str, Any], name: str, choose: Callable[[list[Decimal]], Decimal]
) -> Decimal | None:
    """Return the bound of a range, whether it is inclusive or not; None if there is none."""
    values = [_decimal(schema.get(each)) for each in (name, f"exclusive{name.capitalize()}")]
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _decimal(value: Any) -> Decimal | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = Decimal(repr(value)) if is_number else None
    return number if number is not None and number.is_finite() else None


def _floor(value: Decimal) -> Decimal:
    return value.to_integral_value("ROUND_FLOOR")


def _rewrite_tuple(new: dict[str, Any]) -> None:
    """Say the items of a tuple as drafts since 2020 do."""
    if isinstance(new.get("items"), list) and "prefixItems" not in new:
        new["prefixItems"] = new.pop("items")
        if "additionalItems" in new:
            new["items"] = new.pop("additionalItems")


def _rewrite_times(new: dict[str, Any]) -> None:
    """Hold dates and times to what readers take."""
    pattern = _TIME_PATTERNS.get(str(new.get("format")))
    if pattern is None:
        return
    del new["format"]
    if "pattern" in new:  # zod writes both
        new["allOf"] = [*new.get("allOf", ()), {"type": "string", "pattern": pattern}]
    else:
        new["pattern"] = pattern
    new.setdefault("type", "string")


def _rewrite_property_names(new: dict[str, Any]) -> None:
    """Turn a condition on the names of properties into properties, or into a pattern of them."""
    names = new.get("propertyNames")
    if names is True or (isinstance(names, Mapping) and not set(names) - {"type"} and _is_string(names)):
        del new["propertyNames"]
        return
    declared, others = new.get("properties") or {}, new.get("additionalProperties", True)
    if not isinstance(names, Mapping) or not isinstance(declared, Mapping) or "patternProperties" in new:
        return
    if (listed := _listed_names(names)) is not None:
        if declared.keys() - set(listed):
            return
        # Not a pattern, by which a name might come twice, and of which nothing is left where all are required.
        kept = listed if others is not False else [name for name in listed if name in declared]
        new["properties"] = {name: declared.get(name, others) for name in kept}
    else:
        pattern = _pattern_of_names(names)
        if pattern is None or (declared and others not in (True, {})):
            return
        if not all(re.search(pattern, name) for name in declared):
            return
        if others is not False:
            new["patternProperties"] = {pattern: others}
    del new["propertyNames"]
    new["additionalProperties"] = False
    new.setdefault("type", "object")


def _is_string(schema: Mapping[str, Any]) -> bool:
    return schema.get("type", "string") == "string"


def _listed_names(names: Mapping[str, Any]) -> list[str] | None:
    """Return the names that a schema of names lists; None if it describes them in another way."""
    keys = set(names) - {"type", "title", "description"}
    texts = [names["const"]] if keys == {"const"} else names.get("enum") if keys == {"enum"} else None
    is_list = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
    return texts if is_list and _is_string(names) else None


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """Return the pattern that names fit; None if they are described in another way."""
    keys = set(names) - {"type", "title", "description"}
    if not _is_string(names):
        return None
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        pattern: str = names["pattern"]
        try:
            re.compile(pattern)
        except re.error:
            return None
        return pattern
    if keys and keys <= {"minLength", "maxLength"} and all(type(names[key]) is int for key in keys):
        return f"^.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _rewrite_unevaluated(new: dict[str, Any]) -> None:
    """Say what is not evaluated as what is not named, where one schema sees all that there is."""
    if any(name in new for name in _COMBINATORS):
        return
    for name, known in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name in new:
            new.setdefault(known, new.pop(name))
            new.pop(name, None)


def _without_impossible(parts: list[Any]) -> list[Any]:
    """Leave out branches that no value fits, if others are left."""
    possible = [part for part in parts if part is not False and part not in ({"not": {}}, {"not": True})]
    return possible or parts
