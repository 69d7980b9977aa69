"""Plans on their way through the runner's thread, over a device that answers when a test lets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tests.worker.tiny import step_plan
from triptych.errors import ConfigError, EngineFailure, MemoryShort, ProtocolViolation
from triptych.types.step import StepPlan, StepResult
from triptych.wire.step import Step
from triptych_services.worker.runner.base import CompletedStep, do_nothing
from triptych_services.worker.service.runner_thread import RunnerThread

DEADLINE_S = 30.0


class HeldStep:
    """A `PendingStep` that ends when a test says so."""

    poll_s = 1e-4

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.may_end = threading.Event()
        self.failure: Exception | None = None

    def end(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.may_end.set()

    def is_done(self) -> bool:
        return self.may_end.is_set()

    def wait(self) -> StepResult:
        assert self.may_end.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        return StepResult(self.step_id, np.array([self.step_id], np.uint32))


class HeldRunner:
    """Launches at once; refuses one step if told to."""

    facts = None

    def __init__(self) -> None:
        self.launched: list[HeldStep] = []
        self.num_resets = 0
        self.refused_step = 0
        self.failure: Exception | None = None

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> HeldStep:
        on_prepared()
        if self.failure is not None:
            raise self.failure
        if plan.step_id == self.refused_step:
            raise ProtocolViolation(f"step {plan.step_id} is refused")
        self.launched.append(HeldStep(plan.step_id))
        return self.launched[-1]

    def reset(self) -> None:
        self.num_resets += 1


class HostRunner(HeldRunner):
    """Computes each step before `launch` returns; the second one waits for the test before and after it is prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.may_prepare, self.may_compute = threading.Event(), threading.Event()

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:  # type: ignore[override]
        self.launched.append(HeldStep(plan.step_id))
        if plan.step_id == 2:
            assert self.may_prepare.wait(DEADLINE_S)
        on_prepared()
        if plan.step_id == 2:
            assert self.may_compute.wait(DEADLINE_S)
        return CompletedStep(StepResult(plan.step_id, np.array([plan.step_id], np.uint32)))


class Stand:
    """A runner thread with one session open."""

    def __init__(self, runner: HeldRunner, thread: RunnerThread) -> None:
        self.runner = runner
        self.thread = thread
        self.outcomes: list[StepResult | Exception] = []
        self.session = thread.open_session(self.outcomes.append)

    def submit(self, *step_ids: int) -> None:
        for step_id in step_ids:
            self.thread.submit(self.session, step_plan(step_id), Step(step_id=step_id))

    @property
    def answers(self) -> list[int]:
        return [outcome.step_id for outcome in self.outcomes if isinstance(outcome, StepResult)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def launched(self, count: int) -> list[HeldStep]:
        await self.until(lambda: len(self.runner.launched) >= count)
        return self.runner.launched


@asynccontextmanager
async def stand(runner: HeldRunner | None = None) -> AsyncIterator[Stand]:
    runner, ready = runner or HeldRunner(), asyncio.Event()
    thread = RunnerThread(
        lambda on_phase: runner,
        on_phase=lambda phase, progress: None,
        on_ready=lambda _: ready.set(),
    )
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await ready.wait()
    try:
        yield Stand(runner, thread)
    finally:
        for step in runner.launched:
            step.may_end.set()
        await thread.stop(DEADLINE_S)


async def test_a_plan_that_arrives_while_a_step_is_in_flight_is_launched_at_once() -> None:
    async with stand() as it:
        it.submit(1)
        await it.launched(1)
        it.submit(2)
        steps = await it.launched(2)
        assert it.outcomes == []
        assert it.thread.steps.step_id == 1, "the watchdog sees the oldest"
        steps[0].end()
        await it.until(lambda: it.answers == [1])
        await it.until(lambda: it.thread.steps.step_id == 2)
        it.submit(3)
        await it.launched(3)
        assert it.answers == [1]


async def test_a_result_leaves_when_the_next_step_is_prepared() -> None:
    runner = HostRunner()
    async with stand(runner) as it:
        it.submit(1, 2)
        await it.launched(2)
        for _ in range(3):
            await asyncio.sleep(0)
        assert it.answers == [], "the preparation of step 2 was disturbed"
        runner.may_prepare.set()
        await it.until(lambda: it.answers == [1])
        runner.may_compute.set()
        await it.until(lambda: it.answers == [1, 2])


async def test_what_is_ordered_between_steps_leaves_their_session_alone() -> None:
    async with stand() as it:
        it.submit(1)
        await it.launched(1)
        seen: list[int] = []
        ordered = asyncio.create_task(it.thread.between_steps(lambda: seen.append(len(it.runner.launched))))
        await asyncio.sleep(0)
        it.submit(2, 3)
        await it.launched(3)
        await ordered
        assert seen == [1], "behind the step before it and ahead of those after it"
        for step in it.runner.launched:
            step.end()
        await it.until(lambda: it.answers == [1, 2, 3])


async def test_results_leave_in_the_order_of_the_plans() -> None:
    async with stand() as it:
        it.submit(1, 2, 3)
        first, second, third = await it.launched(3)
        third.end()
        second.end()
        it.submit(4)
        await it.launched(4)
        assert it.answers == []
        first.end()
        await it.until(lambda: it.answers == [1, 2, 3])


async def test_a_step_that_cannot_be_launched_fails_behind_the_results_before_it() -> None:
    async with stand() as it:
        it.runner.refused_step = 3
        it.submit(1, 2, 3, 4)
        first, second = await it.launched(2)
        second.end()
        first.end()
        await it.until(lambda: len(it.outcomes) == 3)
        assert it.answers == [1, 2]
        assert isinstance(it.outcomes[2], ProtocolViolation)
        await it.until(lambda: not it.thread.steps.serial)
        assert len(it.runner.launched) == 2, "nothing follows a failure"


async def test_a_step_that_fails_on_the_device_ends_the_session_and_those_behind_it() -> None:
    async with stand() as it:
        it.submit(1, 2, 3)
        first, second, third = await it.launched(3)
        first.end()
        second.end(RuntimeError("illegal memory access"))
        third.end()
        await it.until(lambda: len(it.outcomes) == 2)
        it.submit(4)
        assert it.answers == [1]
        failure = it.outcomes[1]
        assert isinstance(failure, EngineFailure)
        assert "step 2 failed" in str(failure)
        assert "illegal memory access" in str(failure)
        again: list[StepResult | Exception] = []
        it.session = it.thread.open_session(again.append)
        it.submit(1)
        steps = await it.launched(4)
        steps[3].end()
        await it.until(lambda: len(again) == 1)
        assert it.runner.num_resets == 2
        assert len(it.outcomes) == 2


async def test_a_new_session_hears_nothing_of_the_old_ones_steps() -> None:
    async with stand() as it:
        it.submit(1, 2)
        old = list(await it.launched(2))
        again: list[StepResult | Exception] = []
        it.session = it.thread.open_session(again.append)
        it.submit(1)
        steps = await it.launched(3)
        for step in old:
            step.end()
        steps[2].end()
        await it.until(lambda: len(again) == 1)
        assert it.outcomes == []


async def test_a_session_is_open_once_the_device_is_done_with_the_one_before() -> None:
    async with stand() as it:
        it.submit(1, 2)
        first, second = await it.launched(2)
        opened: list[bool] = []
        again: list[StepResult | Exception] = []
        it.session = it.thread.open_session(again.append, lambda: opened.append(bool(again)))
        it.submit(1)
        await it.launched(3)
        first.end()
        assert await it.thread.ask(lambda runner: runner.num_resets) == 2
        assert not opened, "the second step may still write to blocks"
        second.end()
        it.session = it.thread.open_session(again.append, lambda: opened.append(True))
        it.runner.launched[2].end()
        await it.until(lambda: opened == [True])


async def test_a_session_of_an_idle_device_is_open_at_once() -> None:
    async with stand() as it:
        opened: list[bool] = []
        it.thread.open_session(it.outcomes.append, lambda: opened.append(True))
        await it.until(lambda: opened == [True])


async def test_no_time_counts_as_idle_while_a_step_is_in_flight() -> None:
    async with stand() as it:
        it.submit(1)
        (first,) = await it.launched(1)
        it.submit(2)
        _, second = await it.launched(2)
        first.end()
        second.end()
        await it.until(lambda: it.answers == [1, 2])
        it.submit(3)
        (await it.launched(3))[2].end()
        await it.until(lambda: it.answers == [1, 2, 3])
        idle = [outcome.timings.idle_ns for outcome in it.outcomes if isinstance(outcome, StepResult)]
        assert idle[0] > 0
        assert idle[1] == 0
        assert idle[2] > 0


async def test_stopping_delivers_what_is_in_flight() -> None:
    async with stand() as it:
        it.submit(1)
        (first,) = await it.launched(1)
        stopping = asyncio.create_task(it.thread.stop(DEADLINE_S))
        await asyncio.sleep(0)
        first.end()
        await stopping
        await it.until(lambda: it.answers == [1])
        assert it.thread.ended.done()


async def test_what_is_asked_between_sessions_is_no_step_and_drops_those_in_flight() -> None:
    async with stand() as it:
        it.submit(1, 2)
        steps = await it.launched(2)
        may_answer = threading.Event()

        def act(runner: HeldRunner) -> str:
            assert runner is it.runner
            assert may_answer.wait(DEADLINE_S)
            return "done"

        asked = asyncio.ensure_future(it.thread.ask(act))
        await it.until(
            lambda: it.thread.steps.serial == 0
        )  # however long it takes, the watchdog sees no step
        may_answer.set()
        assert await asked == "done"
        for step in steps:
            step.end()
        it.submit(3)  # of a session that is over
        assert await it.thread.ask(lambda runner: runner.num_resets) == 1
        assert it.outcomes == []
        again = it.thread.open_session(it.outcomes.append)
        it.thread.submit(again, step_plan(1), Step(step_id=1))
        (await it.launched(3))[-1].end()
        await it.until(lambda: it.answers == [1])


async def test_a_refusal_is_told_to_whoever_asked_and_the_thread_goes_on() -> None:
    def refuse(runner: HeldRunner) -> None:
        raise MemoryShort("no room")

    async with stand() as it:
        with pytest.raises(MemoryShort, match="no room"):
            await it.thread.ask(refuse)
        assert await it.thread.ask(lambda runner: 5) == 5


async def test_a_bug_in_what_is_asked_ends_the_thread_with_its_reason() -> None:
    def fail(runner: HeldRunner) -> None:
        raise ValueError("told to")

    async with stand() as it:
        asked = asyncio.ensure_future(it.thread.ask(fail))
        await it.until(it.thread.ended.done)
        assert isinstance(it.thread.ended.exception(), ValueError)
        asked.cancel()


@pytest.mark.parametrize(
    "failure",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    ],
    ids=["torch", "cublas", "triton"],
)
async def test_a_lost_device_ends_the_thread_after_the_failure(failure: RuntimeError) -> None:
    async with stand() as it:
        it.submit(1)
        (step,) = await it.launched(1)
        step.end(failure)
        await it.until(it.thread.ended.done)
        assert it.thread.ended.exception() is failure
        (outcome,) = it.outcomes
        assert isinstance(outcome, EngineFailure)
        assert "step 1 failed" in str(outcome)


async def test_a_device_lost_at_launch_ends_the_thread_with_what_wraps_it() -> None:
    async with stand() as it:
        error = ConfigError("worker.enforce_eager: cannot be captured")
        error.__cause__ = torch.AcceleratorError("CUDA error: operation failed due to a previous error")
        it.runner.failure = error
        it.submit(1)
        await it.until(it.thread.ended.done)
        assert it.thread.ended.exception() is error
        assert it.outcomes == [error]


async def test_a_device_lost_after_its_session_ends_the_thread_at_the_next() -> None:
    async with stand() as it:
        failure = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        it.submit(1)
        await it.launched(1)
        it.runner.failure = failure
        again: list[StepResult | Exception] = []
        it.session = it.thread.open_session(again.append)
        it.submit(1)
        await it.until(it.thread.ended.done)
        assert it.thread.ended.exception() is failure
