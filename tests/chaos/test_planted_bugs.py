"""The validators find what they are there to find: each planted bug, in the scenario that brings it out."""

from __future__ import annotations

import pytest

from tests.chaos.grounds.memory import play_in_memory
from tests.chaos.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.chaos.scenario import Scenario


@pytest.mark.parametrize("bug", PLANTED_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    found = play_in_memory(Scenario.parse(bug.scenario), monkeypatch, on_begin=lambda: bug.plant(monkeypatch))
    assert any(violation.startswith(bug.found_by) for violation in found), found


@pytest.mark.parametrize("text", sorted({bug.scenario for bug in PLANTED_BUGS}))
def test_without_it_the_same_scenario_finds_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not play_in_memory(Scenario.parse(text), monkeypatch)
