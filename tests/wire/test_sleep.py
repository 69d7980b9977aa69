"""A worker sleeps and wakes at an operator's word: what waits meanwhile goes on with the same tokens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    ASLEEP,
    DEADLINE_S,
    PAUSED,
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    running_stack,
)
from triptych.admin.v1 import admin_pb2
from triptych.errors import MemoryShort
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import open_channel
from triptych.rpc.session.handshake import WORKER_PROTOCOL, session_hello
from triptych.types.facts import Phase, SleepLevel
from triptych.types.outputs import FinishedRequest, FinishReason
from triptych.types.sampling import SamplingParams

LONG = {"max_tokens": 400, "ignore_eos": True}
SHORT = {"max_tokens": 5, "ignore_eos": True}
KEEP, WAIT, ABORT = admin_pb2.PAUSE_MODE_KEEP, admin_pb2.PAUSE_MODE_WAIT, admin_pb2.PAUSE_MODE_ABORT


def expected(number: int, sampling: dict[str, Any]) -> list[int]:
    return naive_generation(make_prompt(6, seed=number), number, SamplingParams(**sampling), (EOS,), 512)[0]


async def submit(frontend: FakeFrontend, number: int, sampling: dict[str, Any]) -> None:
    await frontend.submit(number, make_prompt(6, seed=number), sampling=sampling)


async def within_deadline(call: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await call


async def sleep(frontend: FakeFrontend, mode: int = WAIT, **fields: int) -> int:
    request = admin_pb2.SleepRequest(mode=mode, **fields)
    return (await within_deadline(frontend.admin.Sleep(request))).released_bytes


async def wake(frontend: FakeFrontend) -> None:
    await within_deadline(frontend.admin.Wake(admin_pb2.WakeRequest()))


@pytest.mark.parametrize("level", list(SleepLevel))
async def test_what_is_kept_over_a_sleep_goes_on_with_the_same_tokens(level: SleepLevel) -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: len(frontend.tokens.get(1, [])) > 20)
        assert await sleep(frontend, KEEP, level=level.value) == level.value << 30
        assert worker.runner.level is level
        assert worker.status_publisher.state.phase == Phase.ASLEEP
        assert worker.status_publisher.state.held_by == ""
        num_steps = worker.runner.num_steps
        await submit(frontend, 2, SHORT)
        status = await frontend.wait_status(lambda status: status.num_waiting == 2)
        assert (status.state, status.why_not_ready, status.num_used_blocks) == (ASLEEP, "", 0)
        assert not frontend.ends
        await wake(frontend)
        assert worker.runner.level is None
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        assert frontend.tokens == {1: expected(1, LONG), 2: expected(2, SHORT)}
        assert worker.runner.num_steps > num_steps
        assert (await frontend.status()).state != ASLEEP


async def test_sleep_waits_for_started_requests_by_default() -> None:
    async with running_stack(max_num_seqs=1) as (worker, _, frontend):
        for number in (1, 2):
            await submit(frontend, number, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        worker.runner.may_step.clear()
        falling_asleep = asyncio.ensure_future(sleep(frontend))
        await frontend.wait_status(lambda status: status.state == PAUSED)
        assert worker.runner.level is None
        worker.runner.may_step.set()
        await falling_asleep
        assert worker.runner.level is SleepLevel.WEIGHTS_ON_HOST
        await frontend.wait_for(lambda: frontend.ends.keys() == {1})
        await wake(frontend)
        await frontend.wait_for(lambda: frontend.ends.keys() == {1, 2})
        assert frontend.tokens == {1: expected(1, LONG), 2: expected(2, LONG)}


async def test_sleep_with_abort_ends_requests_and_later_ones_wait() -> None:
    async with running_stack() as (_, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        await sleep(frontend, ABORT)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert isinstance(end := frontend.ends[1], FinishedRequest)
        assert end.reason is FinishReason.ABORT
        await submit(frontend, 2, SHORT)
        await wake(frontend)
        await frontend.wait_for(lambda: 2 in frontend.ends)
        assert frontend.tokens[2] == expected(2, SHORT)


async def test_prefixes_are_forgotten_with_the_blocks_that_held_them() -> None:
    async with running_stack() as (_, _, frontend):
        prompt = make_prompt(60, seed=1)
        await frontend.submit(1, prompt, sampling=SHORT)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await sleep(frontend)
        await wake(frontend)
        await frontend.submit(2, prompt, sampling=SHORT)
        await frontend.wait_for(lambda: 2 in frontend.ends)
        assert (await frontend.status()).prefix_hits == 0
        await frontend.submit(3, prompt, sampling=SHORT)
        await frontend.wait_for(lambda: 3 in frontend.ends)
        assert (await frontend.status()).prefix_hits > 0, "they would have been hit"


async def test_a_request_may_end_while_the_worker_sleeps() -> None:
    async with running_stack() as (_, _, frontend):
        await sleep(frontend)
        await frontend.submit(1, make_prompt(6), sampling=SHORT, deadline_remaining_ms=50)
        await submit(frontend, 2, SHORT)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await frontend.abort(2)
        await frontend.wait_for(lambda: 2 in frontend.ends)
        assert (await frontend.status()).num_waiting == 0
        await wake(frontend)


async def test_a_pause_outlasts_a_sleep() -> None:
    async with running_stack() as (_, _, frontend):
        await frontend.admin.Pause(admin_pb2.PauseRequest())
        await sleep(frontend)
        await submit(frontend, 1, SHORT)
        await wake(frontend)
        status = await frontend.wait_status(lambda status: status.num_waiting == 1)
        assert status.state == PAUSED
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: 1 in frontend.ends)


async def test_resume_cancels_pending_sleep_and_wakes_no_worker() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        worker.runner.may_step.clear()
        falling_asleep = asyncio.ensure_future(sleep(frontend))
        await frontend.wait_status(lambda status: status.state == PAUSED)
        with pytest.raises(grpc.aio.AioRpcError, match="does not sleep yet") as refusal:
            await wake(frontend)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await within_deadline(frontend.admin.Resume(admin_pb2.ResumeRequest()))
        with pytest.raises(grpc.aio.AioRpcError, match="resumed before the worker slept"):
            await falling_asleep
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)
        await sleep(frontend)
        await within_deadline(frontend.admin.Resume(admin_pb2.ResumeRequest()))
        assert (await frontend.status()).state == ASLEEP
        await wake(frontend)


async def test_repeated_sleep_must_name_the_same_level() -> None:
    async with running_stack() as (_, _, frontend):
        await wake(frontend)
        released_bytes = await sleep(frontend)
        assert await sleep(frontend, level=1) == released_bytes
        with pytest.raises(grpc.aio.AioRpcError, match="sleeps at level 1; wake it first") as refusal:
            await sleep(frontend, level=2)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await sleep(frontend, level=0) == released_bytes  # unspecified: as level 1
        with pytest.raises(grpc.aio.AioRpcError, match="level: 3 is none of the levels") as refusal:
            await sleep(frontend, level=3)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await wake(frontend)
        await wake(frontend)
        await submit(frontend, 1, SHORT)
        await frontend.wait_for(lambda: 1 in frontend.ends)


async def test_a_caller_that_leaves_changes_nothing() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        worker.runner.may_step.clear()
        call = frontend.admin.Sleep(admin_pb2.SleepRequest(mode=KEEP))
        await frontend.wait_status(lambda status: status.state == PAUSED)
        call.cancel()
        worker.runner.may_step.set()
        await frontend.wait_status(lambda status: status.state == ASLEEP)
        await wake(frontend)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)


async def test_wake_without_memory_fails_and_can_be_repeated() -> None:
    async with running_stack() as (worker, _, frontend):
        await sleep(frontend)
        await submit(frontend, 1, SHORT)
        worker.runner.wake_error = MemoryShort("waking takes 9 MiB, but 2 MiB are free")
        with pytest.raises(grpc.aio.AioRpcError, match="waking takes 9 MiB, but 2 MiB are free") as refusal:
            await wake(frontend)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = await frontend.status()
        assert (status.state, status.why_not_ready, status.num_waiting) == (ASLEEP, "", 1)
        assert worker.status_publisher.state.phase == Phase.ASLEEP
        worker.runner.wake_error = None
        await wake(frontend)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, SHORT)


async def test_a_worker_that_cannot_sleep_says_so_and_serves_on() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        worker.runner.sleep_error = MemoryShort("the weights take 9 MiB")
        with pytest.raises(grpc.aio.AioRpcError, match="the weights take 9 MiB"):
            await sleep(frontend, KEEP)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)
        assert (await frontend.status()).state != ASLEEP


async def test_engine_started_while_the_worker_sleeps_can_wake_it() -> None:
    async with running_stack() as (worker, engine, frontend):
        await sleep(frontend)
        await engine.stop()
        successor = EngineStack(make_config(worker.port))
        await successor.start()
        other = FakeFrontend(successor.address)
        await other.start()
        status = await other.wait_status(lambda status: status.state == ASLEEP)
        assert status.why_not_ready
        assert "the worker is asleep" in status.why_not_ready
        with pytest.raises(grpc.aio.AioRpcError, match="no worker to put to sleep, or it sleeps already"):
            await sleep(other)
        await wake(other)
        await other.wait_ready()
        await submit(other, 1, SHORT)
        await other.wait_for(lambda: 1 in other.ends)
        assert other.tokens[1] == expected(1, SHORT)
        assert (await other.status()).state != ASLEEP
        await other.stop()
        await successor.stop()


async def test_worker_restarted_in_its_sleep_is_taken_at_wake() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        await sleep(frontend, KEEP)
        await worker.stop()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wake(frontend)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await frontend.status()).state == ASLEEP
        config = make_config()
        again = WorkerStack(config, NaiveRunner(config))
        await again.start(worker.port)
        await wake(frontend)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)
        await again.stop()


async def test_sleep_whose_answer_is_lost_can_be_ended() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: len(frontend.tokens.get(1, [])) > 20)
        await frontend.admin.Pause(admin_pb2.PauseRequest(mode=KEEP))
        async with open_channel(f"127.0.0.1:{worker.port}", limit_bytes=1 << 20) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Sleep(worker_pb2.SleepRequest(session_name="boot/1", level=1))
        await frontend.wait_status(lambda status: status.state == ASLEEP)
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await wake(frontend)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)
        assert (await frontend.status()).state != ASLEEP


async def test_sleep_that_takes_too_long_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("triptych_services.enginecore.worker_sleep.SLEEP_TIMEOUT_S", 0.2)
    may_sleep = threading.Event()
    async with running_stack() as (worker, _, frontend):
        fall_asleep = worker.runner.sleep

        def sleep_late(level: SleepLevel) -> int:
            assert may_sleep.wait(DEADLINE_S)
            return fall_asleep(level)

        worker.runner.sleep = sleep_late
        with pytest.raises(grpc.aio.AioRpcError, match=r"did not answer Sleep within 0\.2 s"):
            await sleep(frontend)
        may_sleep.set()
        await frontend.wait_status(lambda status: status.state == ASLEEP)
        await wake(frontend)
        await submit(frontend, 1, LONG)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, LONG)


async def test_only_the_engine_that_holds_a_worker_puts_it_to_sleep() -> None:
    async with running_stack() as (worker, _, frontend):
        async with open_channel(f"127.0.0.1:{worker.port}", limit_bytes=1 << 20) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(
                grpc.aio.AioRpcError, match="this worker is held by engine engine-0"
            ) as refusal:
                await stub.Sleep(worker_pb2.SleepRequest(session_name="boot/77", level=1))
            assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
            await submit(frontend, 1, SHORT)
            await frontend.wait_for(lambda: 1 in frontend.ends)
            await sleep(frontend)
            with pytest.raises(grpc.aio.AioRpcError, match="the worker is asleep"):
                await stub.Sleep(worker_pb2.SleepRequest(session_name="boot/1", level=1))
            call = stub.Execute()
            hello = worker_pb2.Hello(
                session=session_hello(WORKER_PROTOCOL, "", 0), engine_id="other", max_steps_in_flight=1
            )
            await call.write(worker_pb2.ExecuteRequest(hello=hello))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "AdminService.Wake" in await call.details()
            info = (await stub.GetInfo(worker_pb2.GetInfoRequest())).info
            assert (info.phase, info.held_by) == ("asleep", "")
            assert info.facts.kv.num_blocks == worker.runner.facts.kv.num_blocks
        await wake(frontend)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(3))
async def test_random_operator_calls_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    submitted: list[dict[str, Any]] = []
    calls: list[asyncio.Future[Any]] = []
    async with running_stack(max_num_seqs=3) as (_, _, frontend):
        admin = frontend.admin
        for kind in rng.choices(["submit", "sleep", "wake", "pause", "resume"], (4, 2, 2, 1, 2), k=40):
            mode = rng.choice((KEEP, WAIT))
            if kind == "submit":
                submitted.append(rng.choice((LONG, SHORT)))
                await submit(frontend, len(submitted), submitted[-1])
            elif kind == "sleep":
                calls.append(admin.Sleep(admin_pb2.SleepRequest(mode=mode, level=rng.choice((1, 2)))))
            elif kind == "pause":
                calls.append(admin.Pause(admin_pb2.PauseRequest(mode=mode)))
            else:
                request, call = {
                    "wake": (admin_pb2.WakeRequest(), admin.Wake),
                    "resume": (admin_pb2.ResumeRequest(), admin.Resume),
                }[kind]
                calls.append(call(request))
            for _ in range(rng.choice((0, 0, 1, 5))):
                await frontend.status()
        async with asyncio.timeout(DEADLINE_S):
            while (await frontend.status()).state in (ASLEEP, PAUSED) or not all(c.done() for c in calls):
                await admin.Resume(admin_pb2.ResumeRequest())
                with suppress(grpc.aio.AioRpcError):  # a sleep that has begun and is not there yet
                    await admin.Wake(admin_pb2.WakeRequest())
        codes = {await call.code() for call in calls}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE}
        await frontend.wait_for(lambda: len(frontend.ends) == len(submitted))
        for number, sampling in enumerate(submitted, 1):
            assert frontend.tokens[number] == expected(number, sampling)
        await frontend.wait_status(lambda status: not status.num_used_blocks)
