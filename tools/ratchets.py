"""Counts that a change may lower and must not raise: how much of each finding there may be today, and at the end.

A check that finds more than is allowed names everything it found. `LIMITS` is the only place of these numbers: a change
that mends something lowers the number there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Limit(NamedTuple):
    """How often a finding may occur."""

    now: int
    """Fails above it."""
    target: int


LIMITS = {
    "files above 600 lines": Limit(now=0, target=0),
    "functions above 60 lines": Limit(now=0, target=0),
    "classes with more than 20 public methods": Limit(now=2, target=0),
    "constructors with more than 10 arguments": Limit(now=0, target=0),
    "import circles": Limit(now=0, target=0),
    "modules below 150 lines with one importer": Limit(now=36, target=36),
    "names that nothing but their tests uses": Limit(now=0, target=0),
    "docstrings that begin with a fragment": Limit(now=0, target=0),
    "idioms": Limit(now=57, target=57),
}


def hold(finding: str, places: Sequence[str]) -> bool:
    """Return whether a finding occurs at most as often as it may; if not, print every place of it."""
    limit = LIMITS[finding]
    if len(places) > limit.now:
        for place in places:
            print(f"{place}", file=sys.stderr)
        print(f"{finding}: {len(places)}, allowed are {limit.now}", file=sys.stderr)
        return False
    aim = "" if len(places) <= limit.target else f"; the target is {limit.target}"
    print(f"{finding}: {len(places)} of {limit.now} allowed{aim}")
    return True
