"""Plans of upgrades are legal at every step, and upgrade or roll back all of it."""

from __future__ import annotations

from tests.skew.plans import NEW, OLD, is_legal, make_plan, processes_of


def test_plans_are_legal_at_every_step() -> None:
    kinds = set()
    for seed in range(200):
        builds = dict.fromkeys(processes_of(2, 3), OLD)
        for move in (plan := make_plan(seed, 2, 3)):
            assert builds[move.process] != move.build
            builds[move.process] = move.build
            assert is_legal(builds, 2), plan
        assert len(set(builds.values())) == 1, "a plan stops half-way"
        kinds.add(builds["worker-0"])
    assert kinds == {OLD, NEW}
