"""The worker's side of the step protocol: who is let in, which steps are taken, and how a session ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from services.worker.info import InfoBoard
from services.worker.runner_thread import RunnerThread
from services.worker.session import EngineHello, SessionGate
from triptych.errors import EngineFailure, EngineUnavailable, ModelError, ProtocolViolation, WorkerHeld
from triptych.types.facts import KvShape, ModelFacts, Phase, WorkerFacts
from triptych.types.step import StepPlan, StepResult

DEADLINE_S = 10.0
SHARED = {"cache.block_size": "16"}
HELLO = EngineHello("engine-0", 7, 1, 1, "", SHARED, 2)


class StepCounter:
    """A runner that answers with the step's id, and stops before the next step while `may_step` is clear."""

    def __init__(self) -> None:
        self.may_step = threading.Event()
        self.may_step.set()
        self.started = threading.Event()
        self.executed: list[int] = []
        self.num_resets = 0
        self.fail = False
        self.facts = WorkerFacts(
            "boot",
            ModelFacts("counter", "f" * 64, 10, 64, (), "float32", "float32", "none"),
            KvShape(8, 16, 1, 1, 1, "float32"),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_window=4,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        self.started.set()
        assert self.may_step.wait(DEADLINE_S)
        self.executed.append(plan.step_id)
        if self.fail:
            raise ValueError("no such slot")
        return StepResult(plan.step_id, np.array([plan.step_id], np.uint32))

    def reset(self) -> None:
        self.num_resets += 1


@asynccontextmanager
async def ready_gate() -> AsyncIterator[tuple[SessionGate, StepCounter, InfoBoard]]:
    board, runner, ready = InfoBoard(), StepCounter(), asyncio.Event()

    def on_ready(_: object) -> None:
        board.change(phase=Phase.READY, progress=1.0, facts=runner.facts)
        ready.set()

    thread = RunnerThread(lambda on_phase: runner, on_phase=lambda phase, progress: None, on_ready=on_ready)
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await ready.wait()
        yield SessionGate(board, thread, SHARED), runner, board
        runner.may_step.set()
        await thread.stop(DEADLINE_S)
    assert thread.ended.done()
    assert thread.ended.exception() is None


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, last_result_seen=0)


async def take(session, count: int) -> list[int]:
    return [(await session.next_result()).step_id for _ in range(count)]


async def test_steps_are_computed_in_order_one_window_at_a_time() -> None:
    async with ready_gate() as (gate, runner, _):
        session = gate.open(HELLO)
        session.submit(plan(1))
        session.submit(plan(2))
        assert gate.num_in_flight == 2
        assert await take(session, 1) == [1]
        session.submit(plan(3))
        assert await take(session, 2) == [2, 3]
        assert gate.num_in_flight == 0
        assert runner.executed == [1, 2, 3]


async def test_a_gap_and_a_repeated_step_break_the_protocol() -> None:
    async with ready_gate() as (gate, _, _):
        session = gate.open(HELLO)
        with pytest.raises(ProtocolViolation, match="STEP_GAP: step 2 after step 0"):
            session.submit(plan(2))
        session.submit(plan(1))
        with pytest.raises(ProtocolViolation, match="STEP_GAP: step 1 after step 1"):
            session.submit(plan(1))


async def test_a_step_beyond_the_window_breaks_the_protocol() -> None:
    async with ready_gate() as (gate, _, _):
        session = gate.open(HELLO)
        session.submit(plan(1))
        session.submit(plan(2))
        with pytest.raises(ProtocolViolation, match="window of 2"):
            session.submit(plan(3))


async def test_the_window_is_capped_by_what_the_runner_takes() -> None:
    async with ready_gate() as (gate, _, _):
        assert gate.open(replace(HELLO, window=100)).window == 4


async def test_what_a_closed_session_left_undone_is_neither_computed_nor_delivered() -> None:
    async with ready_gate() as (gate, runner, board):
        first = gate.open(HELLO)
        runner.may_step.clear()
        first.submit(plan(1))
        first.submit(plan(2))
        await asyncio.to_thread(runner.started.wait, DEADLINE_S)
        gate.close(first)
        assert board.state.held_by == ""
        second = gate.open(replace(HELLO, epoch=8))
        second.submit(plan(1))
        runner.may_step.set()
        assert await take(second, 1) == [1]
        assert runner.executed == [1, 1], "step 2 of the first session was computed"
        assert runner.num_resets == 2


async def test_a_step_that_fails_ends_the_session_and_the_next_one_starts_clean() -> None:
    async with ready_gate() as (gate, runner, _):
        session = gate.open(HELLO)
        runner.fail = True
        session.submit(plan(1))
        session.submit(plan(2))
        with pytest.raises(EngineFailure, match=r"step 1 failed: ValueError\('no such slot'\)"):
            await session.next_result()
        gate.close(session)
        runner.fail = False
        session = gate.open(HELLO)
        session.submit(plan(1))
        assert await take(session, 1) == [1]
        assert runner.executed == [1, 1], "a step was computed on rows that are undefined"


async def test_another_engine_waits_until_the_holder_has_left() -> None:
    async with ready_gate() as (gate, _, board):
        session = gate.open(HELLO)
        for other in (replace(HELLO, engine_id="engine-1"), replace(HELLO, epoch=8)):
            with pytest.raises(WorkerHeld, match=r"held by engine engine-0 \(epoch 7\)"):
                gate.open(other)
        gate.close(session)
        gate.open(replace(HELLO, engine_id="engine-1"))
        assert board.state.held_by == "engine engine-1 (epoch 7)"


async def test_an_engine_that_dials_again_replaces_its_own_session() -> None:
    async with ready_gate() as (gate, runner, board):
        first = gate.open(HELLO)
        runner.may_step.clear()
        first.submit(plan(1))
        second = gate.open(HELLO)
        with pytest.raises(ProtocolViolation, match="dialled again"):
            await first.next_result()
        gate.close(first)
        assert board.state.held_by == str(HELLO), "the end of the first stream took the second one's place"
        second.submit(plan(1))
        runner.may_step.set()
        assert await take(second, 1) == [1]


async def test_a_draining_session_gives_what_is_in_flight_and_takes_no_more() -> None:
    async with ready_gate() as (gate, runner, _):
        session = gate.open(HELLO)
        runner.may_step.clear()
        session.submit(plan(1))
        gate.drain()
        session.submit(plan(2))
        runner.may_step.set()
        assert await take(session, 1) == [1]
        assert gate.num_in_flight == 0
        with pytest.raises(EngineUnavailable, match="stopping"):
            await session.next_result()
        assert runner.executed == [1]


async def test_an_idle_session_that_drains_ends_at_once() -> None:
    async with ready_gate() as (gate, _, _):
        session = gate.open(HELLO)
        gate.drain()
        with pytest.raises(EngineUnavailable, match="stopping"):
            await session.next_result()


async def test_nobody_is_let_in_before_the_model_is_loaded_or_while_the_worker_drains() -> None:
    async with ready_gate() as (gate, _, board):
        for phase in (Phase.LOADING, Phase.DRAINING):
            board.change(phase=phase, progress=0.25)
            with pytest.raises(EngineUnavailable, match=phase):
                gate.open(HELLO)


async def test_a_model_that_cannot_be_loaded_ends_the_thread_with_the_reason() -> None:
    def load(on_phase) -> StepCounter:
        raise ModelError("model.safetensors: was cut short")

    thread = RunnerThread(load, on_phase=lambda phase, progress: None, on_ready=lambda runner: None)
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([thread.ended])
    assert isinstance(thread.ended.exception(), ModelError)


async def test_a_step_that_hangs_does_not_hang_the_stop() -> None:
    runner, ready = StepCounter(), asyncio.Event()
    thread = RunnerThread(
        lambda on_phase: runner, on_phase=lambda phase, progress: None, on_ready=lambda runner: ready.set()
    )
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await ready.wait()
        runner.may_step.clear()
        thread.submit(thread.open_session(lambda outcome: None), plan(1))
        await asyncio.to_thread(runner.started.wait, DEADLINE_S)
        await thread.stop(0.05)
        assert not thread.ended.done()
        runner.may_step.set()
        await asyncio.wait([thread.ended])
