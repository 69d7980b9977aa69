"""An engine with nothing to do makes no turn, and keeps its promises all the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.scheduling import BLOCK_SIZE, make_prompt
from tests.helpers.stack import DEADLINE_S, FakeFrontend, running_stack
from triptych.admin.v1 import admin_pb2
from triptych.errors import DeadlineExceeded
from triptych.types.outputs import RequestFailure
from triptych_services.enginecore.inbox import Inbox

QUIET_S = 0.3
"""Six ticks of an engine that looked at its deadlines in a rhythm."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grow by one with each turn of the engine's loop."""
    turns: list[None] = []
    make_calls = Inbox.make_calls

    def counting(self: Inbox) -> None:
        turns.append(None)
        make_calls(self)

    monkeypatch.setattr(Inbox, "make_calls", counting)
    return turns


async def quiet(turns: list[None]) -> None:
    """Wait until the engine has made no turn for a while."""
    async with asyncio.timeout(DEADLINE_S):
        num_before = -1
        while len(turns) != num_before:
            num_before = len(turns)
            await asyncio.sleep(QUIET_S)


async def test_an_idle_engine_makes_no_turn(turns: list[None]) -> None:
    async with running_stack() as (_, _, frontend):
        await quiet(turns)
        await frontend.submit(1, make_prompt(8))
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await quiet(turns)


async def test_a_paused_engine_makes_no_turn_and_notices_a_deadline(turns: list[None]) -> None:
    async with running_stack() as (_, _, frontend):
        await frontend.admin.Pause(admin_pb2.PauseRequest(mode=admin_pb2.PAUSE_MODE_WAIT))
        await frontend.submit(1, make_prompt(8), deadline_remaining_ms=1000)
        await frontend.submit(2, make_prompt(8))
        await frontend.wait_for(lambda: 1 in frontend.ends)
        end = frontend.ends[1]
        assert isinstance(end, RequestFailure)
        assert end.code == DeadlineExceeded.code
        await quiet(turns)
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: 2 in frontend.ends)


async def test_a_frontend_that_comes_to_an_idle_engine_hears_its_load(turns: list[None]) -> None:
    async with running_stack() as (_, engine, _):
        await quiet(turns)
        other = FakeFrontend(engine.address)
        await other.start()
        await other.wait_for(lambda: any(batch.load is not None for batch in other.batches))
        await other.stop()


async def test_frontends_of_an_idle_engine_hear_that_its_cache_was_reset(turns: list[None]) -> None:
    async with running_stack() as (_, _, frontend):
        await frontend.submit(1, make_prompt(4 * BLOCK_SIZE))
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await quiet(turns)
        num_before = len(frontend.batches)
        await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        await frontend.wait_for(
            lambda: any(batch.cache and batch.cache.is_cleared for batch in frontend.batches[num_before:])
        )


async def test_a_drain_of_an_idle_loop_offers_what_waits(turns: list[None]) -> None:
    async with running_stack() as (_, engine, frontend):
        await frontend.admin.Pause(admin_pb2.PauseRequest(mode=admin_pb2.PAUSE_MODE_WAIT))
        await frontend.submit(1, make_prompt(8))
        await frontend.wait_for(lambda: any(1 in batch.admitted for batch in frontend.batches))
        await quiet(turns)
        draining = asyncio.create_task(engine.loop.operator.drain())
        await frontend.wait_for(lambda: any(1 in batch.released for batch in frontend.batches))
        await frontend.admin.Resume(admin_pb2.ResumeRequest())
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await asyncio.wait_for(draining, DEADLINE_S)
