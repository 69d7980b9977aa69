"""Routing in simulated time: engines that come and go, and what policies differ in."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks.routing import walk
from benchmarks.routing.loads import LOADS
from benchmarks.routing.simulation import POLICIES, Fleet, create_facts


def run(
    policy: str, load: str, faults: tuple[tuple[float, int, str], ...] = (), seconds: float = 4.0
) -> Fleet:
    config, facts = create_facts()
    users = next(kind for kind in LOADS if kind.name == load).users(np.random.default_rng(0), 3, seconds)
    fleet = Fleet(3, policy, config, facts)
    fleet.run(list(users), faults)
    return fleet


def cached_share(fleet: Fleet) -> float:
    return sum(r.num_cached_tokens for r in fleet.done) / sum(len(r.prompt) for r in fleet.done)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_user(policy: str) -> None:
    fleet = run(policy, "unique", seconds=1.0)
    assert fleet.done
    assert all(len(request.output) == request.turn.num_output_tokens for request in fleet.done)


@pytest.mark.thorough
def test_conversations_find_more_where_they_return() -> None:
    assert cached_share(run("prefix", "multi-turn")) > 1.5 * cached_share(run("round_robin", "multi-turn"))


def test_a_prompt_that_everybody_sends_is_served_by_all() -> None:
    fleet = run("prefix", "hot prompt")
    sent = [engine.num_sent for engine in fleet.engines]
    assert max(sent) <= 1.3 * np.mean(sent)
    assert cached_share(fleet) > 0.85


@pytest.mark.thorough
def test_engines_join_die_and_come_back() -> None:
    faults = ((0.0, 0, "die"), (1.0, 0, "start"), (2.0, 1, "die"), (2.5, 1, "start"))
    fleet = run("prefix", "documents", faults)
    assert all(len(request.output) == request.turn.num_output_tokens for request in fleet.done)
    assert all(engine.num_sent for engine in fleet.engines)


def test_the_walk_is_measured_for_each_number_of_engines() -> None:
    options = {"rounds": 1, "engines": [1, 12], "requests": 3, "reports": 2, "prompt_len": 300}
    figures = list(walk.measure(argparse.Namespace(**options)))
    assert [figure.name.partition(":")[0] for figure in figures] == ["1 engines"] * 6 + ["12 engines"] * 6
    assert all(figure.median > 0 for figure in figures)
