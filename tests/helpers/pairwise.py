"""Chooses few cases of a test with many parameters, so that any two of their values still meet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import combinations


def bring_new_pairs(cases: Iterable[Mapping[str, object]]) -> Iterator[bool]:
    """Say of each case whether it has two values, of two parameters, that no case before it has together.

    The cases of one parameter, or of one row of a table each, bring something new every time.
    """
    return _bring_new(cases, 2)


def bring_new_values(cases: Iterable[Mapping[str, object]]) -> Iterator[bool]:
    """Say of each case whether it has a value of a parameter that no case before it has."""
    return _bring_new(cases, 1)


def _bring_new(cases: Iterable[Mapping[str, object]], num_together: int) -> Iterator[bool]:
    seen: set[Hashable] = set()
    for case in cases:
        values = [(name, _key(value)) for name, value in sorted(case.items())]
        groups = set(combinations(values, min(num_together, len(values))))
        yield not groups <= seen
        seen |= groups


def _key(value: object) -> Hashable:
    """Return what equal values have in common; objects that cannot be compared are equal to themselves alone."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value).__name__, value
