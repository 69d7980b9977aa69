"""The worker's side of the step protocol: who is let in, which steps are taken, and how a session ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    HandshakeMismatch,
    ModelError,
    ProtocolViolation,
    SequenceGap,
    StaleEpoch,
    WorkerAsleep,
    WorkerHeld,
)
from triptych.rpc.session.handshake import KV_GROUPS, WORKER_PROTOCOL, Agreement
from triptych.types.facts import KvKind, KvLayout, ModelFacts, Phase, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.step import StepPlan, StepResult
from triptych.wire.step import Step, plan_from_proto, plan_to_proto
from triptych_services.worker.runner.base import CompletedStep, do_nothing
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.session import DrainNotice, EngineHello, Grant
from triptych_services.worker.service.status import StatusPublisher

DEADLINE_S = 30.0
SHARED = {"cache.block_size": "16"}
HELLO = EngineHello(
    "engine-0", "a", "", SHARED, max_steps_in_flight=2, agreement=Agreement(WORKER_PROTOCOL.version)
)


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
            ModelFacts("counter", ModelIdentity("f" * 64), 10, 64, (), "float32", "float32", "none"),
            KvLayout(8, 16, 1, 1, 1, "float32"),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_steps_in_flight=4,
        )

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:
        on_prepared()
        return CompletedStep(self.execute(plan))

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
async def ready_worker(
    resume_ttl_s: float = 60.0,
) -> AsyncIterator[tuple[WorkerLease, StepCounter, StatusPublisher]]:
    status_publisher, runner, ready = StatusPublisher(), StepCounter(), asyncio.Event()

    def on_ready(_: object) -> None:
        status_publisher.change(phase=Phase.READY, progress=1.0, facts=runner.facts)
        ready.set()

    thread = RunnerThread(lambda on_phase: runner, on_phase=lambda phase, progress: None, on_ready=on_ready)
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await ready.wait()
        yield (
            WorkerLease(status_publisher, thread, SHARED, resume_ttl_s=resume_ttl_s),
            runner,
            status_publisher,
        )
        runner.may_step.set()
        await thread.stop(DEADLINE_S)
    assert thread.ended.done()
    assert thread.ended.exception() is None


def plan(step_id: int, last_result_seen: int = 0) -> Step:
    return plan_to_proto(StepPlan(step_id=step_id, last_result_seen=last_result_seen))


async def take(grant: Grant, count: int) -> list[int]:
    return [(await anext(grant.outcomes)).step_id for _ in range(count)]


def resume(grant: Grant, last_result_seen: int) -> EngineHello:
    name = grant.session.name
    return replace(
        grant.session.hello, resume_session=name, last_session=name, last_result_seen=last_result_seen
    )


async def test_steps_are_computed_in_order_one_window_at_a_time() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        assert not grant.terms.is_resumed
        runner.may_step.clear()
        grant.submit(plan(1))
        grant.submit(plan(2))
        assert lease.num_in_flight == 2
        runner.may_step.set()
        assert await take(grant, 2) == [1, 2]
        grant.submit(plan(3, 2))
        assert await take(grant, 1) == [3]
        assert lease.num_in_flight == 0
        assert runner.executed == [1, 2, 3]


async def test_a_gap_is_refused_and_has_no_effect() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        with pytest.raises(SequenceGap, match="step 2 after 0"):
            grant.submit(plan(2))
        grant.submit(plan(1))
        assert await take(grant, 1) == [1]
        assert runner.executed == [1]


async def test_a_repeated_step_is_answered_again_and_computed_once() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        runner.may_step.clear()
        grant.submit(plan(1))
        grant.submit(plan(1))  # it is being computed: one answer is enough
        runner.may_step.set()
        assert await take(grant, 1) == [1]
        grant.submit(plan(1))
        assert await take(grant, 1) == [1]
        grant.submit(plan(2, last_result_seen=1))
        grant.submit(plan(1))  # the engine has said that it holds this one
        assert await take(grant, 1) == [2]
        assert runner.executed == [1, 2]


async def test_a_step_beyond_the_window_breaks_the_protocol() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        runner.may_step.clear()
        grant.submit(plan(1))
        grant.submit(plan(2))
        with pytest.raises(ProtocolViolation, match="limit of 2 steps in flight"):
            grant.submit(plan(3))


async def test_a_result_that_does_not_exist_cannot_be_acknowledged() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        runner.may_step.clear()
        grant.submit(plan(1))
        with pytest.raises(ProtocolViolation, match="last_result_seen: 1 is above 0"):
            grant.submit(plan(2, last_result_seen=1))


async def test_the_window_is_capped_by_what_the_runner_takes() -> None:
    async with ready_worker() as (lease, _, _):
        assert lease.open(replace(HELLO, max_steps_in_flight=100)).session.max_steps_in_flight == 4


async def test_broken_stream_resumes_with_unseen_results() -> None:
    async with ready_worker() as (lease, runner, status_publisher):
        first = lease.open(HELLO)
        first.submit(plan(1))
        assert await take(first, 1) == [1]
        runner.may_step.clear()
        first.submit(plan(2, last_result_seen=1))
        first.submit(plan(3, last_result_seen=1))
        lease.release(first)
        assert status_publisher.state.held_by == str(HELLO), "its rows are still here"
        runner.may_step.set()
        second = lease.open(resume(first, last_result_seen=1))
        assert second.terms.is_resumed
        assert second.terms.last_received == 3
        assert await take(second, 2) == [2, 3]
        second.submit(plan(4, last_result_seen=3))
        assert await take(second, 1) == [4]
        assert (runner.executed, runner.num_resets) == ([1, 2, 3, 4], 1)


async def test_results_of_an_absence_are_sent_first() -> None:
    async with ready_worker() as (lease, runner, _):
        first = lease.open(HELLO)
        first.submit(plan(1))
        first.submit(plan(2))
        lease.release(first)
        async with asyncio.timeout(DEADLINE_S):
            while lease.num_in_flight:
                await asyncio.sleep(0)
        second = lease.open(resume(first, last_result_seen=0))
        assert second.session.outbox.last_number == 2
        assert await take(second, 2) == [1, 2]
        assert runner.executed == [1, 2]


async def test_replaced_stream_takes_no_more_steps() -> None:
    async with ready_worker() as (lease, runner, status_publisher):
        first = lease.open(HELLO)
        second = lease.open(resume(first, last_result_seen=0))
        with pytest.raises(ProtocolViolation, match="a newer stream has taken this one's place"):
            await anext(first.outcomes)
        first.submit(plan(1))
        first.leave()
        lease.release(first)
        assert status_publisher.state.held_by == str(HELLO), (
            "the end of the first stream took the second one's place"
        )
        second.submit(plan(1))
        assert await take(second, 1) == [1]
        assert runner.executed == [1]


@pytest.mark.parametrize("seen", [0, 3], ids=["results that were acknowledged", "results that do not exist"])
async def test_a_session_that_cannot_go_on_without_loss_starts_anew(seen) -> None:
    async with ready_worker() as (lease, runner, _):
        first = lease.open(HELLO)
        first.submit(plan(1))
        assert await take(first, 1) == [1]
        first.submit(plan(2, last_result_seen=1))
        assert await take(first, 1) == [2]
        lease.release(first)
        second = lease.open(resume(first, last_result_seen=seen))
        assert not second.terms.is_resumed
        assert second.session.name != first.session.name
        second.submit(plan(1))
        assert await take(second, 1) == [1]
        assert runner.num_resets == 2


async def test_an_engine_that_starts_anew_replaces_its_own_session() -> None:
    async with ready_worker() as (lease, runner, _):
        first = lease.open(HELLO)
        runner.may_step.clear()
        first.submit(plan(1))
        first.submit(plan(2))
        await asyncio.to_thread(runner.started.wait, DEADLINE_S)
        second = lease.open(HELLO)
        with pytest.raises(ProtocolViolation, match="has started a new session"):
            await anext(first.outcomes)
        second.submit(plan(1))
        runner.may_step.set()
        assert await take(second, 1) == [1]
        assert runner.executed == [1, 1], "step 2 of the first session was computed"


async def test_goodbye_frees_the_worker_and_drops_undone_steps() -> None:
    async with ready_worker() as (lease, runner, status_publisher):
        first = lease.open(HELLO)
        runner.may_step.clear()
        first.submit(plan(1))
        first.submit(plan(2))
        await asyncio.to_thread(runner.started.wait, DEADLINE_S)
        first.leave()
        assert await anext(first.outcomes, None) is None
        lease.release(first)
        assert status_publisher.state.held_by == ""
        second = lease.open(replace(HELLO, engine_id="engine-1"))
        second.submit(plan(1))
        runner.may_step.set()
        assert await take(second, 1) == [1]
        assert runner.executed == [1, 1]
        assert runner.num_resets == 2


async def test_rows_are_freed_when_the_engine_stays_away(monkeypatch) -> None:
    monkeypatch.setattr("triptych_services.worker.service.lease._GRACE_S", 0.0)
    async with ready_worker(resume_ttl_s=0.01) as (lease, _, status_publisher):
        first = lease.open(HELLO)
        lease.release(first)
        async with asyncio.timeout(DEADLINE_S):
            while status_publisher.state.held_by:
                await asyncio.sleep(0.001)
        assert not lease.open(resume(first, last_result_seen=0)).terms.is_resumed


async def test_failing_step_ends_the_session_and_the_next_is_clean() -> None:
    async with ready_worker() as (lease, runner, _):
        first = lease.open(HELLO)
        runner.fail = True
        first.submit(plan(1))
        first.submit(plan(2))
        with pytest.raises(EngineFailure, match=r"step 1 failed: ValueError\('no such slot'\)"):
            await anext(first.outcomes)
        lease.release(first)
        runner.fail = False
        second = lease.open(resume(first, last_result_seen=0))
        assert not second.terms.is_resumed
        second.submit(plan(1))
        assert await take(second, 1) == [1]
        assert runner.executed == [1, 1], "a step was computed on rows that are undefined"


async def test_an_engine_that_knows_no_groups_is_refused() -> None:
    async with ready_worker() as (lease, runner, status_publisher):
        kv = runner.facts.kv
        groups = (*kv.groups, replace(kv.groups[0], kind=KvKind.WINDOW, window=32))
        status_publisher.change(facts=replace(runner.facts, kv=replace(kv, groups=groups)))
        with pytest.raises(HandshakeMismatch, match="upgrade the engine core first"):
            lease.open(HELLO)
        lease.open(replace(HELLO, agreement=Agreement(WORKER_PROTOCOL.version, KV_GROUPS)))


async def test_other_engines_are_refused_while_the_holder_lives() -> None:
    async with ready_worker() as (lease, _, _):
        lease.open(HELLO)
        for other in (replace(HELLO, engine_id="engine-1"), replace(HELLO, boot_id="b")):
            with pytest.raises(WorkerHeld, match=r"held by engine engine-0 \(boot a\)"):
                lease.open(other)


async def test_the_same_engine_started_again_takes_a_lost_stream_over_and_fences() -> None:
    async with ready_worker() as (lease, _, status_publisher):
        first = lease.open(HELLO)
        lease.release(first)
        again = replace(HELLO, boot_id="b")
        second = lease.open(again)
        assert status_publisher.state.held_by == "engine engine-0 (boot b)"
        with pytest.raises(WorkerHeld, match=r"held by engine engine-0 \(boot b\)"):
            lease.open(HELLO)  # one that has held nothing may wait
        for late in (resume(first, last_result_seen=0), replace(HELLO, last_session=first.session.name)):
            with pytest.raises(StaleEpoch, match=r"\(boot a\) is stale: engine engine-0 \(boot b\)"):
                lease.open(late)
        second.leave()
        lease.release(second)
        assert status_publisher.state.held_by == ""
        with pytest.raises(StaleEpoch):
            lease.open(resume(first, last_result_seen=0))
        third = lease.open(replace(again, last_session=second.session.name))
        assert third.session.epoch > second.session.epoch > first.session.epoch


async def test_another_engine_waits_until_the_session_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.worker.service.lease._GRACE_S", 0.0)
    standby = replace(HELLO, engine_id="engine-1", boot_id="b")
    async with ready_worker(resume_ttl_s=0.2) as (lease, _, status_publisher):
        first = lease.open(HELLO)
        lease.release(first)
        with pytest.raises(WorkerHeld, match="held by engine engine-0"):
            lease.open(standby)
        async with asyncio.timeout(DEADLINE_S):
            while status_publisher.state.held_by:
                await asyncio.sleep(0.001)
        second = lease.open(standby)
        lease.release(second)
        with pytest.raises(StaleEpoch):
            lease.open(replace(HELLO, last_session=first.session.name))


async def test_sessions_of_another_worker_fence_nobody() -> None:
    """A worker that was started again has granted nothing: any engine may have it."""
    async with ready_worker() as (lease, _, _):
        first = lease.open(replace(HELLO, last_session="another boot/7"))
        lease.release(first)
        second = lease.open(replace(HELLO, boot_id="b", last_session="another boot/9"))
        with pytest.raises(WorkerHeld):
            lease.open(replace(HELLO, boot_id="c", last_session="another boot/8"))
        lease.release(second)


async def test_draining_session_finishes_what_is_in_flight() -> None:
    async with ready_worker() as (lease, runner, _):
        grant = lease.open(HELLO)
        runner.may_step.clear()
        grant.submit(plan(1))
        lease.drain()
        grant.submit(plan(2))
        runner.may_step.set()
        assert isinstance(await anext(grant.outcomes), DrainNotice)
        assert await take(grant, 1) == [1]
        assert lease.num_in_flight == 0
        with pytest.raises(EngineUnavailable, match="stopping"):
            await anext(grant.outcomes)
        assert runner.executed == [1]


async def test_an_idle_session_that_drains_ends_at_once() -> None:
    async with ready_worker() as (lease, _, _):
        grant = lease.open(HELLO)
        lease.drain()
        assert isinstance(await anext(grant.outcomes), DrainNotice)
        with pytest.raises(EngineUnavailable, match="stopping"):
            await anext(grant.outcomes)


async def test_loading_or_draining_worker_refuses_engines() -> None:
    async with ready_worker() as (lease, _, status_publisher):
        for phase in (Phase.LOADING, Phase.DRAINING):
            status_publisher.change(phase=phase, progress=0.25)
            with pytest.raises(EngineUnavailable, match=phase):
                lease.open(HELLO)


async def test_waiting_for_readiness_ends_with_it_or_with_its_time() -> None:
    status_publisher = StatusPublisher()
    status_publisher.change(phase=Phase.LOADING)
    await status_publisher.wait_settled(0.01)
    waiting = asyncio.create_task(status_publisher.wait_settled(DEADLINE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    status_publisher.change(phase=Phase.READY)
    async with asyncio.timeout(DEADLINE_S / 2):
        await waiting
    status_publisher.change(phase=Phase.WARMING)
    waiting = asyncio.create_task(status_publisher.wait_settled(DEADLINE_S))
    await asyncio.sleep(0)
    assert not waiting.done(), "it wakes from a sleep"
    status_publisher.change(phase=Phase.DRAINING)
    async with asyncio.timeout(DEADLINE_S / 2):
        await waiting


async def test_model_that_cannot_be_loaded_ends_the_thread() -> None:
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
        thread.submit(thread.open_session(lambda outcome: None), plan_from_proto(plan(1)), plan(1))
        await asyncio.to_thread(runner.started.wait, DEADLINE_S)
        await thread.stop(0.05)
        assert not thread.ended.done()
        runner.may_step.set()
        await asyncio.wait([thread.ended])


async def test_sleep_ends_an_idle_session_by_its_name() -> None:
    async with ready_worker() as (lease, runner, status_publisher):
        with pytest.raises(EngineUnavailable, match="'boot/1' has ended"):
            lease.end("boot/1")
        grant = lease.open(HELLO)
        with pytest.raises(WorkerHeld, match="held by engine engine-0"):
            lease.end("boot/9")
        runner.may_step.clear()
        grant.submit(plan(1))
        with pytest.raises(ProtocolViolation, match="1 steps are in flight"):
            lease.end(grant.session.name)
        runner.may_step.set()
        assert await take(grant, 1) == [1]
        lease.end(grant.session.name)
        assert status_publisher.state.held_by == ""
        with pytest.raises(WorkerAsleep):
            await anext(grant.outcomes)
        assert not lease.open(resume(grant, 1)).terms.is_resumed


async def test_a_worker_that_drains_does_not_fall_asleep() -> None:
    async with ready_worker() as (lease, _, status_publisher):
        grant = lease.open(HELLO)
        status_publisher.change(phase=Phase.DRAINING)
        with pytest.raises(EngineUnavailable, match="the worker is draining"):
            lease.end(grant.session.name)
