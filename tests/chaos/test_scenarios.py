"""Seeded scenarios in fake time: whatever breaks, every client sees what it would have seen.

SCENARIOS=2000 python -m pytest tests/chaos/test_scenarios.py       so many of them, from FIRST_SCENARIO on
SCENARIO='seed=7 engines=2 …' python -m pytest tests/chaos/test_scenarios.py -k given
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.chaos.grounds.memory import play_in_memory
from tests.chaos.scenario import Fault, Scenario, make_scenario

FIRST = int(os.environ.get("FIRST_SCENARIO", "0"))
COUNT = int(os.environ.get("SCENARIOS", "12"))
LAST_FAULT_S = 2.0
VICTIMS = tuple(os.environ.get("VICTIMS", "worker enginecore frontend").split())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(make_scenario(seed, VICTIMS, last_s=LAST_FAULT_S, at_places=True, has_changes=True), monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_faults_of_a_model_with_windows_and_states(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = make_scenario(seed, VICTIMS, last_s=LAST_FAULT_S, at_places=True, has_changes=True)
    _check(replace(scenario, has_transfers=False, has_groups=True), monkeypatch)


@pytest.mark.skipif("SCENARIO" not in os.environ, reason="SCENARIO gives none")
def test_given(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(Scenario.parse(os.environ["SCENARIO"]), monkeypatch)


def test_scenarios_survive_their_text() -> None:
    scenario = Scenario(7, 2, 1, 16, (Fault(0.35, "kill", "worker-0", 0.4), Fault(1.0, "hold", "a>b", 3.0)))
    for has_transfers, has_groups in ((False, False), (True, False), (False, True)):
        scenario = replace(scenario, has_transfers=has_transfers, has_groups=has_groups)
        assert Scenario.parse(str(scenario)) == scenario


def _check(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    found = play_in_memory(scenario, monkeypatch)
    command = f"SCENARIO='{scenario}' python -m pytest -n0 tests/chaos/test_scenarios.py -k given"
    assert not found, "\n".join((command, *found))
