"""Stages that compute different steps at the same time, on a clock that moves when told, with a real scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.in_process import InProcessEngine
from tests.worker.simulated import SleepingClock, simulated_runner
from tests.worker.tiny import new_row, step_plan
from triptych.config.step_times import StepTimeModel
from triptych.types.sampling import SamplingParams
from triptych_services.worker.simulation.stages import SimulatedStages

ROWS_COST = StepTimeModel(base_ms=0, prefill_token_us=50, decode_row_us=100, context_token_ns=0)
NUM_ROWS, NUM_TOKENS = 16, 200  # filling and emptying the stages takes as long as a few tokens


@dataclass
class Run:
    """Requests on a worker with stages."""

    tokens: list[list[int]]
    seconds: float


def run(num_stages: int, *, is_known: bool = True, prompt: int = 4, num_rows: int = NUM_ROWS) -> Run:
    """Generate for all rows at once.

    Args:
        is_known: Whether the engine is told of the stages.
    """
    clock = SleepingClock()
    stages = SimulatedStages(
        ROWS_COST, num_stages=num_stages, max_num_seqs=NUM_ROWS, clock=clock, sleep=clock.sleep
    )
    runner = simulated_runner(
        stages=stages,
        num_stages=num_stages if is_known else 1,
        max_num_seqs=NUM_ROWS,
        num_blocks=2000,
        max_model_len=1024,
    )
    engine = InProcessEngine(runner, steps_in_flight=num_stages + 1, max_num_batched_tokens=512)
    started = clock()
    prompts = [[10 + row] * prompt for row in range(num_rows)]
    tokens = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    return Run(tokens, (clock() - started) / 1e9)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_that_share_the_rows_do_not_stand_idle(num_stages: int) -> None:
    one = run(1)
    unsplit, split = run(num_stages, is_known=False), run(num_stages)
    assert unsplit.tokens == split.tokens == one.tokens
    assert unsplit.seconds == pytest.approx(one.seconds, rel=0.01), "one stage computes, the others wait"
    assert one.seconds / split.seconds > 0.95 * num_stages


def test_a_long_prompt_is_in_several_stages_at_once() -> None:
    one, split = run(1, prompt=900, num_rows=1), run(4, prompt=900, num_rows=1)
    first_token_s = 900 * 50e-6
    saved_s = one.seconds - split.seconds  # the tokens after the first take as long, one after the other
    assert split.tokens == one.tokens
    assert saved_s > 0.6 * first_token_s


def test_a_step_waits_for_its_tokens_and_for_nothing_else() -> None:
    clock = SleepingClock()
    stages = SimulatedStages(ROWS_COST, num_stages=2, max_num_seqs=8, clock=clock, sleep=clock.sleep)
    runner = simulated_runner(stages=stages, num_stages=2)
    started = clock()
    rows = [new_row(slot, [5], [1 + slot]) for slot in range(2)]
    first = runner.launch(step_plan(1, new=rows))  # two tokens of prompts: 50 us in each stage
    ahead = runner.launch(step_plan(2, skipped=[1]))
    other = runner.launch(step_plan(3, skipped=[0]))
    assert not first.is_done()
    assert first.wait().timings.forward_ns == 50_000
    assert clock() - started == 100_000
    assert first.is_done()
    assert ahead.wait().timings.gap_ns == 50_000, "the token of the first step was needed"
    assert clock() - started == 200_000
    assert other.wait().timings.gap_ns == 0
    assert clock() - started == 250_000
