"""Requests that have ended leave nothing to the collector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.helpers.garbage import without_collector
from tests.helpers.stack import NaiveRunner, make_config
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore

SESSION = 1
NUM_REQUESTS = 200


class Core:
    """An engine core with its worker, in this thread."""

    def __init__(self, num_blocks: int = 200) -> None:
        config = make_config()
        self.engine, self.runner = EngineCore(config), NaiveRunner(config, num_blocks)
        self.engine.frontends.open_session(SESSION)
        self.engine.worker_ready(self.runner.facts, after_crash=False)
        self.ends = Counter[str]()

    def submit(
        self, number: int, *, num_prompt_tokens: int = 20, max_tokens: int = 1, **fields: object
    ) -> None:
        prompt = [number % 50, *range(num_prompt_tokens - 1)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        choice = single_choice(number, f"r{number}", prompt, sampling, seed=1, **fields)  # type: ignore[arg-type]
        self.engine.frontends.submit(SESSION, choice)

    def step(self) -> None:
        if (plan := self.engine.plan()) is not None:
            self.engine.apply(self.runner.execute(plan))
        for batch in self.engine.take_outputs().values():
            self.ends.update(end.reason.name for end in batch.finished)
            self.ends.update(failure.code for failure in batch.failures)

    def run(self) -> None:
        while self.engine.num_requests:
            self.step()


def one_after_another(core: Core) -> None:
    for number in range(NUM_REQUESTS):
        core.submit(number)
        core.run()


def tenants_side_by_side(core: Core) -> None:
    """Levels and tenants come and go while others stay."""
    for number in range(NUM_REQUESTS):
        core.submit(number, tenant=f"t{number % 7}", priority=number % 3, max_tokens=1 + number % 4)
        core.step()
    core.run()


def aborted(core: Core) -> None:
    for number in range(NUM_REQUESTS):
        core.submit(number, max_tokens=50)
        if number % 2:
            core.step()
        core.engine.frontends.abort(SESSION, number)
        core.run()


def refused(core: Core) -> None:
    for number in range(NUM_REQUESTS):
        core.submit(number, num_prompt_tokens=600)
        core.run()


def preempted(core: Core) -> None:
    """32 blocks are just enough for the prompts of eight requests."""
    for first in range(0, NUM_REQUESTS, 8):
        for number in range(first, first + 8):
            core.submit(number, num_prompt_tokens=60, max_tokens=10)
        core.run()


@pytest.mark.parametrize(
    ("scenario", "end"),
    [
        (one_after_another, "LENGTH"),
        (tenants_side_by_side, "LENGTH"),
        (aborted, "ABORT"),
        (refused, "INVALID_REQUEST"),
        (preempted, "LENGTH"),
    ],
)
def test_requests_leave_nothing_to_the_collector(scenario: Callable[[Core], None], end: str) -> None:
    core = Core(num_blocks=33 if scenario is preempted else 200)
    with without_collector() as left:
        scenario(core)
        core.step()  # takes the last outputs
    assert core.ends == {end: NUM_REQUESTS}
    assert not [name for name in left if name.startswith("triptych_services.enginecore")]
    if scenario is preempted:
        assert core.engine.scheduler is not None
        assert core.engine.scheduler.counters.num_preemptions
