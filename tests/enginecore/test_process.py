"""The engine core as a process: how it starts, ends, and what its end means for others."""

from __future__ import annotations

import asyncio
import signal
import socket

import grpc.aio

from tests.helpers.processes import service_process
from tests.helpers.scheduling import make_prompt
from tests.helpers.stack import DEADLINE_S, FakeFrontend, NaiveRunner, WorkerStack, make_config


def assert_orderly(lines: list[str]) -> None:
    output = "\n".join(lines)
    for word in ("Traceback", "never retrieved", "never awaited", "was destroyed"):
        assert word not in output, output


async def test_taken_port_is_one_line_and_exit_code_2(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("engine.port", "engine.metrics-port"):
            async with service_process("enginecore", tmp_path, f"--{option}={port}") as engine:
                code, output = await engine.end()
                lines = output.splitlines()
            assert code == 2
            *others, line = lines
            assert not [other for other in others if "add_port.cc" not in other], "only gRPC may add a line"
            assert line.startswith(
                f"triptych_services.enginecore: {option.replace('-', '_')}: cannot bind 127.0.0.1:{port}"
            )


async def test_sigterm_lets_what_runs_finish_and_exits_with_0(tmp_path) -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    async with service_process(
        "enginecore", tmp_path, f"--engine.worker-address=127.0.0.1:{worker.port}"
    ) as engine:
        frontend = FakeFrontend(f"127.0.0.1:{await engine.port()}")
        await frontend.start()
        await frontend.wait_ready()
        worker.runner.may_step.clear()
        for number in range(8):
            await frontend.submit(number, make_prompt(6, seed=number))
        await frontend.wait_status(lambda status: status.num_running + status.num_waiting == 8)
        engine.process.send_signal(signal.SIGTERM)
        await frontend.wait_for(lambda: not frontend.welcomes[-1].ready)
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: len(frontend.ends) == 8)
        async with asyncio.timeout(DEADLINE_S):
            await frontend.ended()
        code, output = await engine.end()
        lines = output.splitlines()
        assert code == 0, lines
        assert_orderly(lines)
        assert not any(" WARN " in line or " ERROR " in line for line in lines), lines
        await frontend.stop()
    await worker.stop()


async def test_unusable_worker_ends_the_engine_and_its_streams(tmp_path) -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    async with service_process(
        "enginecore", tmp_path, f"--engine.worker-address=127.0.0.1:{worker.port}"
    ) as engine:
        frontend = FakeFrontend(f"127.0.0.1:{await engine.port()}")
        await frontend.start()
        await frontend.wait_ready()
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6), sampling={"max_tokens": 400})
        await frontend.wait_status(lambda status: status.num_running == 1)
        port = worker.port
        await worker.stop()
        smaller = WorkerStack(config, NaiveRunner(config, num_blocks=4))
        await smaller.start(port)
        code, output = await engine.end()
        lines = output.splitlines()
        assert code == 2, lines
        assert_orderly(lines)
        assert any("cannot serve: max_model_len 512 does not fit into 3 KV blocks" in line for line in lines)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await frontend.ended()
        except grpc.aio.AioRpcError:
            pass  # output either way: the stream has ended
        await frontend.stop()
        await smaller.stop()
