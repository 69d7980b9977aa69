"""Import circles, and small modules with one importer."""

from __future__ import annotations

from pathlib import Path

from tools import verify_modules
from tools.verify_modules import circles, fragments, is_allowed, path_of


def importers_of(*imports: tuple[str, str]) -> dict[str, set[str]]:
    """Return module to importers, from pairs of importer and module."""
    names = {name for pair in imports for name in pair}
    return {name: {importer for importer, module in imports if module == name} for name in names}


def test_circles_are_counted_once_each() -> None:
    assert list(circles(importers_of(("a", "b"), ("b", "c"), ("a", "c")))) == []
    (around,) = circles(importers_of(("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")))
    assert set(around.split(" <- ")) == {"a", "b", "c"}
    both = importers_of(("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("a", "c"))
    assert {frozenset(around.split(" <- ")) for around in circles(both)} == {frozenset("ab"), frozenset("cd")}


def test_fragments_are_small_with_one_importer() -> None:
    importers = importers_of(("top", "small"), ("top", "long"), ("top", "shared"), ("long", "shared"))
    num_lines = {"top": 10, "small": 149, "long": 150, "shared": 10}
    assert list(fragments(importers, num_lines)) == ["small: 149 lines, imported by top"]


def test_entries_of_registries_may_be_small() -> None:
    assert is_allowed("triptych_services.worker.models.mamba")
    assert is_allowed("triptych.cli.__main__")
    assert not is_allowed("triptych_services.enginecore.inbox")


def test_modules_are_found_behind_the_link_to_services() -> None:
    assert path_of("triptych_services.enginecore.loop") is not None
    assert path_of("triptych_services.enginecore") is None
    assert path_of("tools.verify_modules") == Path(verify_modules.__file__)
