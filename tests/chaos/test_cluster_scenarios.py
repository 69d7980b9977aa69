"""Seeded scenarios with real processes, signals, sockets and time. CLUSTER_SCENARIOS, FIRST_SCENARIO, SCENARIO: as in
test_scenarios.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.grounds.cluster import LongAnswersGround, play_in_cluster
from tests.chaos.scenario import Scenario, make_scenario

pytestmark = pytest.mark.model  # of which the tokenizer is read

FIRST = int(os.environ.get("FIRST_SCENARIO", "0"))
COUNT = int(os.environ.get("CLUSTER_SCENARIOS", "0"))
LAST_FAULT_S = 3.0
VICTIMS = ("worker", "enginecore", "frontend")
KILLS = (
    "seed=1 engines=2 frontends=1 requests=16: 0.800 kill worker-0 0.100; 1.500 kill enginecore-1 0.100; "
    "1.800 hold frontend-0>enginecore-0 1.000; 2.000 stop worker-1 0.700"
)
FRONTEND_DIES = (
    "seed=2 engines=1 frontends=2 requests=16: 1.200 kill frontend-0 0.300; "
    "1.400 cut frontend-1>enginecore-0 0.000"
)
PROMPTS_ELSEWHERE = (
    "seed=3 engines=2 frontends=1 requests=32 transfers=1: 1.000 kill worker-0 0.100; "
    "1.600 kill worker-1 0.100"
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(KILLS, id="below"),
        pytest.param(FRONTEND_DIES, id="frontend"),
        pytest.param(PROMPTS_ELSEWHERE, id="transfers"),
    ],
)
async def test_one_of_each_tier_dies(text: str, tmp_path: Path) -> None:
    await _check(Scenario.parse(text), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_two_engines_die_a_second_apart(seed: int, tmp_path: Path) -> None:
    """Both are started again at once. No stream is lost, though many are at the second one when it dies."""
    faults = "1.000 kill enginecore-0 0.000; 2.000 kill enginecore-1 0.000"
    scenario = Scenario.parse(f"seed={seed} engines=2 frontends=2 requests=15: {faults}")
    found = await play_in_cluster(scenario, tmp_path, LongAnswersGround)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
async def test_random_faults(seed: int, tmp_path: Path) -> None:
    await _check(make_scenario(seed, VICTIMS, last_s=LAST_FAULT_S), tmp_path)


@pytest.mark.skipif("SCENARIO" not in os.environ, reason="SCENARIO gives none")
async def test_given(tmp_path: Path) -> None:
    await _check(Scenario.parse(os.environ["SCENARIO"]), tmp_path)


async def _check(scenario: Scenario, directory: Path) -> None:
    found = await play_in_cluster(scenario, directory)
    command = f"SCENARIO='{scenario}' python -m pytest -n0 tests/chaos/test_cluster_scenarios.py -k given"
    assert not found, "\n".join((command, *found))
