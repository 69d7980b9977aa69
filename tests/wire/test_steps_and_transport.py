"""Steps and outputs do not wait for the transport, and a transport that takes nothing is noticed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from tests.helpers.scheduling import BLOCK_SIZE
from tests.helpers.stack import DEADLINE_S, NaiveRunner, make_config, make_executor
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.rpc.session.handshake import WORKER_PROTOCOL, SessionTerms, read_hello
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych.types.submit import single_choice
from triptych.wire.worker import worker_facts_to_proto
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.workers import grpc_executor
from triptych_services.enginecore.workers.base import WorkerLost
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor

NUM_TOKENS = 1 << 22
"""Length of the prompt in the first step: its 16 MB are more than a stream of HTTP/2 takes in."""
NUM_BLOCKS = 2 * NUM_TOKENS // BLOCK_SIZE + 1
NUM_STEPS = 12


class DeafWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Welcomes an engine, and reads nothing that it sends until `listens` is set."""

    def __init__(self, runner: NaiveRunner) -> None:
        self.listens = asyncio.Event()
        self.step_ids: list[int] = []
        self._facts = worker_facts_to_proto(runner.facts)

    async def Execute(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        _, agreement = await read_hello(requests, WORKER_PROTOCOL)
        terms = SessionTerms("session", False, 0, 10.0, agreement)
        welcome = worker_pb2.Welcome(session=terms.to_proto(), max_steps_in_flight=1, facts=self._facts)
        yield worker_pb2.ExecuteResponse(welcome=welcome)
        await self.listens.wait()
        async for request in requests:
            self.step_ids.append(request.step.step_id)


def large_step(runner: NaiveRunner) -> StepPlan:
    engine = EngineCore(make_config())
    engine.worker_ready(runner.facts, after_crash=False)
    engine.frontends.open_session(1)
    engine.frontends.submit(1, single_choice(1, "1", [1] * NUM_TOKENS, SamplingParams(), seed=1))
    plan = engine.plan()
    assert plan is not None
    return plan


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[DeafWorker, GrpcExecutor, asyncio.Event, StepPlan]]:
    config = make_config()
    runner = NaiveRunner(config, num_blocks=NUM_BLOCKS, max_model_len=2 * NUM_TOKENS)
    worker, server = DeafWorker(runner), RpcServer(services=(), limit_bytes=INTERNAL_MESSAGE_BYTES)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.grpc)
    port = server.bind("127.0.0.1", 0, option="worker.port")
    await server.start()
    executor = make_executor(port, config, boot_id="boot", max_steps_in_flight=1)
    news = asyncio.Event()
    await executor.connect(news.set, resume=False)
    try:
        yield worker, executor, news, large_step(runner)
    finally:
        await executor.close()
        await server.stop(0)


async def test_steps_wait_for_a_slow_transport_and_their_sender_does_not() -> None:
    async with connected() as (worker, executor, _, plan), asyncio.timeout(DEADLINE_S):
        for step_id in range(1, NUM_STEPS + 1):
            await executor.send(replace(plan, step_id=step_id))
        assert executor.receive() == []
        worker.listens.set()
        while len(worker.step_ids) < NUM_STEPS:
            await asyncio.sleep(0.01)
        assert worker.step_ids == list(range(1, NUM_STEPS + 1))


@pytest.mark.thorough
async def test_a_worker_that_takes_no_bytes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_executor, "_SEND_TIMEOUT_S", 0.5)
    async with connected() as (_, executor, news, plan), asyncio.timeout(DEADLINE_S):
        for step_id in range(1, NUM_STEPS + 1):
            await executor.send(replace(plan, step_id=step_id))
        await news.wait()
        with pytest.raises(WorkerLost, match=r"the worker took no step for 0\.5 s"):
            executor.receive()
        with pytest.raises(WorkerLost, match="took no step"):
            await executor.send(replace(plan, step_id=NUM_STEPS + 1))


def test_grpc_knows_what_services_ask_of_it() -> None:
    """It logs names that it does not know, and goes on without them."""
    program = "import triptych_services, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}

    def complaints(**more: str) -> str:
        command = [sys.executable, "-c", program]
        run = subprocess.run(
            command, env=environment | more, capture_output=True, text=True, check=True, timeout=60
        )
        return run.stderr

    assert "experiment" not in complaints().lower()
    assert "Unknown experiment: none" in complaints(GRPC_EXPERIMENTS="none")
