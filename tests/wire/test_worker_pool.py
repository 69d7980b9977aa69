"""Engines that take any worker of a pool which no other engine holds, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import DEADLINE_S, EngineStack, FakeFrontend, NaiveRunner, WorkerStack, make_config
from triptych.admin.v1 import admin_pb2
from triptych.config.loader import shared_config
from triptych.types.outputs import FinishedRequest
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.workers.base import WorkerGone
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor

LONG = {"max_tokens": 300, "ignore_eos": True}
RESUME_TTL_S = 60.0
"""For a session to be waited for: a take-over that waits for it misses the deadline of the test."""


class Pool:
    """Workers, and engines with a frontend each that know all their addresses."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.workers: list[WorkerStack] = []
        self.engines: list[EngineStack] = []

    async def add_worker(self) -> WorkerStack:
        config = make_config()
        runner = NaiveRunner(config)
        runner.facts = replace(runner.facts, boot_id=f"boot-{len(self.workers)}")
        config = replace(config, engine=replace(config.engine, resume_ttl_s=RESUME_TTL_S))
        worker = WorkerStack(config, runner)
        await worker.start()
        self.workers.append(worker)
        self._stack.push_async_callback(worker.stop)
        return worker

    async def add_engine(self) -> FakeFrontend:
        config = make_config()
        addresses = ",".join(f"127.0.0.1:{worker.port}" for worker in self.workers)
        engine_id = f"engine-{len(self.engines)}"
        engine = EngineStack(
            replace(config, engine=replace(config.engine, worker_address=addresses, engine_id=engine_id))
        )
        await engine.start()
        self.engines.append(engine)
        self._stack.push_async_callback(engine.stop)
        frontend = FakeFrontend(engine.address)
        await frontend.start()
        self._stack.push_async_callback(frontend.stop)
        return frontend

    def holder(self, worker: WorkerStack) -> str:
        """Return the name of the engine that a worker serves; empty if there is none."""
        return worker.status_publisher.state.held_by

    async def holders(self, count: int) -> list[WorkerStack]:
        """Wait until so many workers serve an engine, and return them."""
        async with asyncio.timeout(DEADLINE_S):
            while len(held := [worker for worker in self.workers if self.holder(worker)]) != count:
                await asyncio.sleep(0.01)
        return held


@asynccontextmanager
async def pool_of(num_workers: int) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        pool = Pool(stack)
        for _ in range(num_workers):
            await pool.add_worker()
        yield pool


def expected(number: int, **sampling: object) -> list[int]:
    params = SamplingParams(**sampling)
    return naive_generation(make_prompt(6), number, params, (EOS,), 512)[0]


async def test_each_engine_takes_a_worker_of_its_own() -> None:
    async with pool_of(3) as pool:
        frontends = [await pool.add_engine() for _ in range(2)]
        for frontend in frontends:
            await frontend.wait_ready()
        held = await pool.holders(2)
        assert len({pool.holder(worker) for worker in held}) == 2
        for number, frontend in enumerate(frontends):
            await frontend.submit(number, make_prompt(6))
            await frontend.wait_for(lambda number=number, frontend=frontend: number in frontend.ends)
            assert frontend.tokens[number] == expected(number, max_tokens=16)


async def test_an_engine_without_a_free_worker_waits_and_says_why() -> None:
    async with pool_of(1) as pool:
        first, second = await pool.add_engine(), await pool.add_engine()
        await pool.holders(1)
        loser = first if "engine-1" in pool.holder(pool.workers[0]) else second
        await loser.wait_for(lambda: bool(loser.welcomes) and "held by" in loser.welcomes[-1].why_not_ready)


async def test_a_spare_takes_over_from_a_worker_that_dies() -> None:
    async with pool_of(2) as pool:
        frontend = await pool.add_engine()
        await frontend.wait_ready()
        (worker,) = await pool.holders(1)
        (spare,) = [other for other in pool.workers if other is not worker]
        for number in (1, 2, 3):
            await frontend.submit(number, make_prompt(6), sampling=LONG)
        await frontend.wait_for(lambda: all(len(frontend.tokens.get(n, ())) > 5 for n in (1, 2, 3)))
        await worker.stop()  # nobody listens at its port any more
        await frontend.wait_for(lambda: {1, 2, 3} <= frontend.ends.keys())
        for number in (1, 2, 3):
            assert isinstance(frontend.ends[number], FinishedRequest)
            assert frontend.tokens[number] == expected(number, **LONG)
        assert pool.holder(spare)


async def test_a_worker_that_serves_another_engine_is_left_to_it() -> None:
    async with pool_of(2) as pool:
        addresses = [f"127.0.0.1:{worker.port}" for worker in pool.workers]
        first = executor("first", ",".join(addresses))
        await first.connect(lambda: None, resume=False)
        taken, (other,) = first.address, set(addresses) - {first.address}
        await first.close()
        second = executor("second", taken)
        await second.connect(lambda: None, resume=False)
        with pytest.raises(WorkerGone, match="second") as gone:
            await first.connect(lambda: None, resume=True)
        assert not gone.value.has_died
        await first.connect(lambda: None, resume=False)
        assert first.address == other
        for each in (first, second):
            await each.close()


def executor(name: str, addresses: str) -> GrpcExecutor:
    return GrpcExecutor(
        address=addresses,
        engine_id=name,
        boot_id=name,
        shared_config=shared_config(make_config()),
        max_steps_in_flight=2,
    )


async def test_an_engine_stays_with_the_worker_that_it_put_to_sleep() -> None:
    async with pool_of(2) as pool:
        frontend = await pool.add_engine()
        await frontend.wait_ready()
        (worker,) = await pool.holders(1)
        await frontend.admin.Sleep(admin_pb2.SleepRequest(mode=admin_pb2.PAUSE_MODE_KEEP))
        await frontend.wait_status(lambda status: status.state == admin_pb2.ENGINE_STATE_ASLEEP)
        for _ in range(3):  # dials
            await asyncio.sleep(0.1)
            assert not any(pool.holder(other) for other in pool.workers if other is not worker)
        await frontend.admin.Wake(admin_pb2.WakeRequest())
        await frontend.wait_status(lambda status: status.state == admin_pb2.ENGINE_STATE_READY)
        assert await pool.holders(1) == [worker]
