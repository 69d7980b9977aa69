"""Engine core and simulated worker as two processes, and what an operating system does to processes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.helpers.processes import DEADLINE_S, Service, free_port, service_process
from tests.helpers.stack import FakeFrontend, num_finished
from tests.helpers.step_relay import Cut, StepRelay
from triptych.config import EngineConfig
from triptych.config.loader import shared_config
from triptych.errors import EngineUnavailable, WorkerHeld
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor

pytestmark = pytest.mark.model  # its tokenizer's vocabulary, not its weights

SIMULATED = ("--simulation.enabled=true", "--simulation.base-ms=3")
NUM_REQUESTS = 64
ENDLESS = 4000
"""Tokens that take the simulated worker so long that a test on a busy machine still cancels in time."""


async def submit_all(
    frontend: FakeFrontend,
    *,
    first: int,
    count: int = NUM_REQUESTS,
    max_tokens: int = 60,
    endless: Collection[int] = (),
) -> None:
    for number in range(count):
        prompt = [1000 + 37 * number + place for place in range(5 + number)]
        limit = ENDLESS if first + number in endless else max_tokens
        sampling = {
            "temperature": float(number % 2), "max_tokens": limit, "ignore_eos": True,
        }  # fmt: skip
        await frontend.submit(first + number, prompt, sampling=sampling, seed=number)


async def tokens_of_all(frontend: FakeFrontend, numbers: range) -> list[list[int]]:
    async with asyncio.timeout(DEADLINE_S):
        await frontend.wait_for(lambda: frontend.ends.keys() >= set(numbers))
    return [frontend.tokens.get(number, []) for number in numbers]


async def undisturbed(frontend: FakeFrontend, *, max_tokens: int = 60) -> list[list[int]]:
    await submit_all(frontend, first=1, max_tokens=max_tokens)
    return await tokens_of_all(frontend, range(1, 1 + NUM_REQUESTS))


async def connect_frontend(stack: AsyncExitStack, engine: Service) -> FakeFrontend:
    frontend = FakeFrontend(f"127.0.0.1:{await engine.port()}")
    await frontend.start()
    stack.push_async_callback(frontend.stop)
    async with asyncio.timeout(DEADLINE_S):
        await frontend.wait_ready()
    return frontend


async def test_a_worker_killed_in_mid_step_costs_no_token_and_changes_none(tmp_path: Path) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        flags = (*SIMULATED, f"--worker.port={port}")
        worker = await stack.enter_async_context(service_process("worker", tmp_path, *flags))
        engine = await stack.enter_async_context(
            service_process("enginecore", tmp_path, f"--engine.worker-address=127.0.0.1:{port}")
        )
        frontend = await connect_frontend(stack, engine)
        expected = await undisturbed(frontend)
        await submit_all(frontend, first=1000)
        await frontend.wait_for(lambda: len(frontend.tokens.get(1000, [])) > 20)
        worker.process.kill()
        await worker.process.wait()
        await stack.enter_async_context(service_process("worker", tmp_path, *flags))
        assert await tokens_of_all(frontend, range(1000, 1000 + NUM_REQUESTS)) == expected
        status = await frontend.wait_status(lambda status: not status.num_used_blocks)
        assert (status.num_running, status.num_waiting) == (0, 0)


@pytest.mark.thorough
async def test_a_worker_that_stands_still_goes_on_where_it_was(tmp_path: Path) -> None:
    max_tokens = 900  # 2.7 s at least: it is stopped in the middle on a busy machine, too
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            service_process("worker", tmp_path, *SIMULATED, "--worker.hang-timeout-s=1")
        )
        address = f"--engine.worker-address=127.0.0.1:{await worker.port()}"
        engine = await stack.enter_async_context(service_process("enginecore", tmp_path, address))
        frontend = await connect_frontend(stack, engine)
        expected = await undisturbed(frontend, max_tokens=max_tokens)
        num_tokens = (await frontend.status()).num_scheduled_tokens
        await submit_all(frontend, first=1000, max_tokens=max_tokens)
        await frontend.wait_for(lambda: len(frontend.tokens.get(1000, [])) > 5)
        worker.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)  # three times what a step is given: but nothing ran, so nothing hung
        assert 1000 not in frontend.ends, "it has not stopped"
        worker.process.send_signal(signal.SIGCONT)
        assert await tokens_of_all(frontend, range(1000, 1000 + NUM_REQUESTS)) == expected
        # The second round finds its prompts in the prefix cache. Steps would be no measure: on a busy machine requests
        # arrive over several.
        assert (await frontend.status()).num_scheduled_tokens <= 2 * num_tokens, "it was computed again"
        assert worker.process.returncode is None


@pytest.mark.thorough
async def test_100_cancels_among_200_requests_leave_nothing_behind_and_change_no_other_token(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(service_process("worker", tmp_path, *SIMULATED))
        address = f"--engine.worker-address=127.0.0.1:{await worker.port()}"
        engine = await stack.enter_async_context(service_process("enginecore", tmp_path, address))
        frontend = await connect_frontend(stack, engine)
        await submit_all(frontend, first=1, count=200)
        expected = await tokens_of_all(frontend, range(1, 201))
        cancelled = range(1001, 1201, 2)  # some of them run, some wait
        await submit_all(frontend, first=1001, count=200, endless=cancelled)
        await frontend.wait_for(lambda: len(frontend.tokens.get(1001, [])) > 5)
        await frontend.abort(*cancelled)
        tokens = await tokens_of_all(frontend, range(1001, 1201))
        for number, own in enumerate(tokens, 1001):
            if number in cancelled:
                assert own[:60] == expected[number - 1001][: len(own)]
                assert len(own) < ENDLESS, "it ran to its end"
            else:
                assert own == expected[number - 1001], f"request {number}"
        status = await frontend.status()
        assert (status.num_running, status.num_waiting, status.num_used_blocks) == (0, 0, 0)
        assert num_finished(status, "abort") == 100


async def test_a_step_that_hangs_ends_the_worker_with_code_70_and_says_where_it_stood(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        flags = ("--simulation.enabled=true", "--simulation.base-ms=600000", "--worker.hang-timeout-s=0.5")
        worker = await stack.enter_async_context(service_process("worker", tmp_path, *flags))
        address = f"--engine.worker-address=127.0.0.1:{await worker.port()}"
        engine = await stack.enter_async_context(service_process("enginecore", tmp_path, address))
        frontend = await connect_frontend(stack, engine)
        await frontend.submit(1, [1000, 1001], sampling={"max_tokens": 4})
        code, told = await worker.end()
        assert code == 70
        assert "step 1 has run for" in told
        assert "worker.hang_timeout_s" in told
        assert "simulation/device.py" in told, "nobody can see where it hangs"
        await frontend.abort(1)
        await frontend.wait_for(lambda: 1 in frontend.ends)


async def test_an_engine_whose_worker_was_taken_over_ends_with_code_3(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(service_process("worker", tmp_path, *SIMULATED))
        relay = StepRelay(await worker.port())
        await relay.start()
        stack.push_async_callback(relay.stop)
        address = f"--engine.worker-address=127.0.0.1:{relay.port}"
        engine = await stack.enter_async_context(service_process("enginecore", tmp_path, address))
        frontend = await connect_frontend(stack, engine)
        await submit_all(frontend, first=1, max_tokens=2000)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)

        def cut(message: object) -> list[object]:
            raise Cut

        relay.is_refusing, relay.up = True, cut
        successor = GrpcExecutor(
            address=f"127.0.0.1:{await worker.port()}",
            engine_id=socket.gethostname(),  # as that of an engine that was given no name
            boot_id="its next process",
            shared_config=shared_config(EngineConfig()),
            max_steps_in_flight=2,
        )
        stack.push_async_callback(successor.close)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await successor.connect(lambda: None, resume=False)
                    break
                except (WorkerHeld, EngineUnavailable):
                    await asyncio.sleep(0.02)
        relay.is_refusing, relay.up = False, lambda message: [message]
        code, told = await engine.end()
        assert code == 3
        assert f"fenced: engine {socket.gethostname()} (boot " in told
        assert f"is stale: engine {socket.gethostname()} (boot its next proc)" in told
