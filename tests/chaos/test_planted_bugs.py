"""The validators find what they are there to find: each planted bug, in the scenario that brings it out."""

from __future__ import annotations

import pytest

from tests.chaos.grounds.memory import play_in_memory
from tests.chaos.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.chaos.scenario import Scenario


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name.replace(" ", "-"), marks=[pytest.mark.slow] * (place >= 3))
        for place, bug in enumerate(PLANTED_BUGS)  # `make test-chaos` plants all
    ],
)
def test_a_planted_bug_is_found(bug: PlantedBug) -> None:
    found: list[str] = []
    for text in bug.scenarios:
        with pytest.MonkeyPatch.context() as patch:
            found += play_in_memory(
                Scenario.parse(text), patch, on_begin=lambda patch=patch: bug.plant(patch)
            )
        if any(violation.startswith(bug.found_by) for violation in found):
            return
    pytest.fail(f"{bug.found_by} has not found it: {found}")


@pytest.mark.slow
@pytest.mark.parametrize("text", sorted({text for bug in PLANTED_BUGS for text in bug.scenarios}))
def test_without_it_the_same_scenario_finds_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not play_in_memory(Scenario.parse(text), monkeypatch)
