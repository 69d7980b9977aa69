"""Operators' calls to a busy engine: pause, resume, drain, status, reset."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import DEADLINE_S, PAUSED, FakeFrontend, WorkerStack, running_stack
from triptych.admin.v1 import admin_pb2
from triptych.types.outputs import FinishedRequest, FinishReason
from triptych.types.sampling import SamplingParams

LONG = {"max_tokens": 400, "ignore_eos": True}
SHORT = {"max_tokens": 5, "ignore_eos": True}


def expected(number: int, sampling: dict[str, Any]) -> list[int]:
    return naive_generation(make_prompt(6, seed=number), number, SamplingParams(**sampling), (EOS,), 512)[0]


async def submit(frontend: FakeFrontend, number: int, sampling: dict[str, Any]) -> None:
    await frontend.submit(number, make_prompt(6, seed=number), sampling=sampling)


async def hold_in_step(worker: WorkerStack, frontend: FakeFrontend, numbers: list[int]) -> None:
    """Until these run, with a step in the worker that does not end before `may_step` is set."""
    await frontend.wait_for(lambda: frontend.tokens.keys() >= set(numbers))
    worker.runner.may_step.clear()


async def within_deadline(call: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await call


async def test_keep_freezes_requests_and_resume_continues_them() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await hold_in_step(worker, frontend, [1])
        pause = asyncio.ensure_future(
            frontend.admin.Pause(admin_pb2.PauseRequest(mode=admin_pb2.PAUSE_MODE_KEEP))
        )
        await frontend.wait_status(lambda status: status.state == PAUSED)
        assert not pause.done(), "a step is still in the worker"
        worker.runner.may_step.set()
        await within_deadline(pause)
        num_steps = worker.runner.num_steps
        await submit(frontend, 2, SHORT)
        status = await frontend.wait_status(lambda status: status.num_waiting == 1)
        assert (status.num_running, status.state, status.why_not_ready) == (1, PAUSED, "")
        assert worker.runner.num_steps == num_steps
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        assert frontend.tokens[1] == expected(1, LONG)
        assert frontend.tokens[2] == expected(2, SHORT)
        assert (await frontend.status()).state != PAUSED


async def test_wait_finishes_started_requests_and_starts_none() -> None:
    async with running_stack(max_num_seqs=2) as (worker, _, frontend):
        for number in (1, 2, 3):
            await submit(frontend, number, LONG)
        await hold_in_step(worker, frontend, [1, 2])
        pause = asyncio.ensure_future(frontend.admin.Pause(admin_pb2.PauseRequest()))
        await frontend.wait_status(lambda status: status.state == PAUSED)
        worker.runner.may_step.set()
        await within_deadline(pause)
        await frontend.wait_for(
            lambda: frontend.ends.keys() >= {1, 2}
        )  # the answer may overtake their last tokens
        assert frontend.tokens == {1: expected(1, LONG), 2: expected(2, LONG)}
        status = await frontend.status()
        assert (status.num_running, status.num_waiting) == (0, 1)
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: 3 in frontend.ends)
        assert frontend.tokens[3] == expected(3, LONG)


async def test_wait_takes_back_those_that_are_preempted_meanwhile() -> None:
    async with running_stack(num_blocks=34, max_num_seqs=2) as (worker, _, frontend):
        for number in (1, 2):
            await submit(frontend, number, LONG)
        await hold_in_step(worker, frontend, [1, 2])
        pause = asyncio.ensure_future(frontend.admin.Pause(admin_pb2.PauseRequest()))
        await frontend.wait_status(lambda status: status.state == PAUSED)
        worker.runner.may_step.set()
        await within_deadline(pause)
        assert (await frontend.status()).num_preemptions > 0
        await frontend.wait_for(lambda: frontend.ends.keys() >= {1, 2})
        assert frontend.tokens == {1: expected(1, LONG), 2: expected(2, LONG)}


async def test_abort_ends_everything_and_later_requests_wait() -> None:
    async with running_stack(max_num_seqs=1) as (worker, _, frontend):
        for number in (1, 2):
            await submit(frontend, number, LONG)
        await hold_in_step(worker, frontend, [1])
        pause = asyncio.ensure_future(
            frontend.admin.Pause(admin_pb2.PauseRequest(mode=admin_pb2.PAUSE_MODE_ABORT))
        )
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        worker.runner.may_step.set()
        await within_deadline(pause)
        for end in frontend.ends.values():
            assert isinstance(end, FinishedRequest)
            assert end.reason is FinishReason.ABORT
        assert (await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).num_blocks >= 0
        await submit(frontend, 3, SHORT)
        await frontend.wait_status(lambda status: status.num_waiting == 1)
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: 3 in frontend.ends)
        assert frontend.tokens[3] == expected(3, SHORT)


async def test_an_unknown_mode_is_refused_by_name() -> None:
    async with running_stack() as (_, _, frontend):
        with pytest.raises(grpc.aio.AioRpcError, match="mode: 9 is none of the modes") as refusal:
            await frontend.admin.Pause(admin_pb2.PauseRequest(mode=9))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await frontend.status()).state != PAUSED


async def test_drain_ends_with_the_last_request() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await hold_in_step(worker, frontend, [1])
        drain = asyncio.ensure_future(frontend.admin.Drain(admin_pb2.DrainRequest()))
        await frontend.wait_for(lambda: not frontend.welcomes[-1].ready)
        assert frontend.welcomes[-1].why_not_ready == "the engine is draining"
        assert not drain.done()
        worker.runner.may_step.set()
        await within_deadline(drain)
        await frontend.wait_for(lambda: 1 in frontend.ends)  # its answer may overtake the last outputs
        assert frontend.tokens[1] == expected(1, LONG)
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_ready()
        await submit(frontend, 2, SHORT)
        await frontend.wait_for(lambda: 2 in frontend.ends)


async def test_a_reset_is_refused_while_blocks_are_in_use() -> None:
    async with running_stack() as (worker, _, frontend):
        await submit(frontend, 1, LONG)
        await hold_in_step(worker, frontend, [1])
        with pytest.raises(grpc.aio.AioRpcError, match="blocks are in use") as refusal:
            await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        worker.runner.may_step.set()
