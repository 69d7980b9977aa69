"""Many engines in a process, each with its own port and scheduler, and a frontend of them.

Run as a program it is that process: it writes the ports as JSON, then answers each line on stdin with counts so far.
Accelerators are simulated at slowed time. A step takes `--step-s` of wall time, however much it computes, so that what
the process spends is the engines' own work; or, with `--slowdown`, as long as its work does, times this factor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.harness.processes import Answers
from benchmarks.routing.simulation import STEP_TIMES, TimedDevice, create_facts
from triptych.admin.v1 import admin_pb2_grpc
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig
from triptych.errors import EngineUnavailable
from triptych.hub import resolve_model
from triptych.internal.v1 import engine_core_pb2_grpc
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.process import ServiceProcess
from triptych.observe.metrics import EngineMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult
from triptych_services.enginecore import wake_timer
from triptych_services.enginecore.frontends.servicer import (
    ADMIN_SERVICE,
    SERVICE,
    AdminServicer,
    EngineCoreServicer,
)
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers.base import Connected
from triptych_services.worker.simulation.runner import SimulatedRunner, create_simulated_runner
from triptych_services.worker.simulation.vocabulary import read_word_ids

START_S = 300.0
POLL_S = 0.2
_STEPS_IN_FLIGHT = 2
_BLOCK_SIZE = 16
_RUNNING: set[asyncio.Task[None]] = set()


def start_frontend(stack: ExitStack, ports: Sequence[int], **options: object) -> ServiceProcess:
    """Start a frontend of the engines at these ports, which ends with the stack.

    Args:
        options: Of the frontend, as `routing="prefix"`.
    """
    own = dict.fromkeys(("port", "http_port", "admin_port", "metrics_port"), 0)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    flags = {**own, "engine_addresses": addresses, **options}
    texts = [f"--frontend.{name.replace('_', '-')}={value}" for name, value in flags.items()]
    texts += ["--simulation.enabled=true", "--log.level=warning"]
    frontend = ServiceProcess("triptych_services.frontend", os.environ, lambda line: None)
    frontend.begin(texts)
    stack.callback(frontend.kill)
    return frontend


def wait_ports(frontend: ServiceProcess) -> dict[str, int]:
    """Return the ports of a frontend when it has bound them.

    Raises:
        RuntimeError: It has ended, or takes too long.
    """
    ends_at = time.monotonic() + START_S
    while (ports := frontend.read_ports()) is None:
        if (end := frontend.poll()) is not None or time.monotonic() > ends_at:
            raise RuntimeError(f"the frontend {end or 'does not serve'}: " + " | ".join(frontend.tail))
        time.sleep(POLL_S)
    return dict(ports)


class SlowedWorker:
    """An `Executor` that computes a step at once and returns its result when the step's time has passed."""

    address = "simulated"
    session_name = ""

    def __init__(self, runner: SimulatedRunner, step_s: Callable[[], float]) -> None:
        """`step_s`: Returns the seconds of the step that was computed last."""
        self.num_steps = self.num_tokens = 0
        self.busy_s = 0.0
        self._runner = runner
        self._step_s = step_s
        self._free_at = 0.0
        self._arrived: list[StepResult] = []
        self._on_event: Callable[[], None] = lambda: None

    async def connect(self, on_event: Callable[[], None], *, resume: bool) -> Connected:
        """See `Executor`."""
        self._on_event = on_event
        self._runner.reset()
        return Connected(self._runner.facts, _STEPS_IN_FLIGHT, 0.0, False)

    async def send(self, plan: StepPlan) -> None:
        """See `Executor`."""
        loop = asyncio.get_running_loop()
        result = self._runner.execute(plan)
        step_s = self._step_s()
        self.busy_s += step_s
        self._free_at = max(self._free_at, loop.time()) + step_s
        loop.call_at(self._free_at, self._finish, result)

    def receive(self) -> list[StepResult]:
        """See `Executor`."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_kv_progress(self) -> None:
        """See `Executor`."""

    async def call(self, method: str, *, timeout_s: float, **fields: object) -> Any:
        """See `Executor`."""
        raise EngineUnavailable(f"{method}: a simulated worker has no calls")

    async def close(self) -> None:
        """See `Executor`."""

    def _finish(self, result: StepResult) -> None:
        self.num_steps += 1
        self.num_tokens += len(result.token_ids)
        self._arrived.append(result)
        self._on_event()


async def serve(arguments: argparse.Namespace) -> None:
    """Run the engines until stdin is closed."""
    answers = Answers()
    config, facts = create_facts() if arguments.slowdown else _small_facts(arguments.streams)
    if not arguments.slowdown:
        wake_timer.TICK_S = max(wake_timer.TICK_S, arguments.step_s)  # time is slowed, and so are timers
    directory = resolve_model(config.model.model)
    architecture = read_architecture(directory)
    words = np.array(read_word_ids(directory, architecture.vocab_size, architecture.eos_token_ids))
    workers, servers, ports = [], [], []
    for number in range(arguments.first, arguments.first + arguments.engines):
        device = TimedDevice(STEP_TIMES)
        runner = SimulatedRunner(facts=facts, device=device, word_ids=words)
        if arguments.slowdown:
            worker = SlowedWorker(runner, lambda device=device: device.last_s * arguments.slowdown)  # type: ignore[misc]
        else:
            worker = SlowedWorker(runner, lambda: arguments.step_s)
        server, port = _create_engine(config, f"engine-{number}", worker)
        await server.start()
        workers.append(worker)
        servers.append(server)
        ports.append(port)
    answers.write({"ports": ports})
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        answers.write(
            {
                "steps": sum(worker.num_steps for worker in workers),
                "tokens": sum(worker.num_tokens for worker in workers),
                "busy_s": [worker.busy_s / (arguments.slowdown or 1) for worker in workers],
                "cpu_s": time.process_time(),
            }
        )
    answers.write({})


def _small_facts(num_streams: int) -> tuple[EngineConfig, WorkerFacts]:
    """Return the config and the facts of engines for this many short streams each."""
    max_model_len = 256
    config = config_from_overrides(
        {
            "simulation.enabled": True,
            "max_num_seqs": num_streams,
            "max_model_len": max_model_len,
            "num_blocks": num_streams * (max_model_len // _BLOCK_SIZE + 1) + 1,
        }
    )
    directory = resolve_model(config.model.model)
    return config, create_simulated_runner(
        config, directory, boot_id="scale", on_phase=lambda phase, progress: None
    ).facts


def _create_engine(config: EngineConfig, engine_id: str, worker: SlowedWorker) -> tuple[RpcServer, int]:
    """Return an engine's server and port; the engine runs from now on."""
    config = replace(config, engine=replace(config.engine, engine_id=engine_id))
    loop = EngineLoop(
        config=config,
        executor=worker,
        metrics=EngineMetrics.create(CollectorRegistry()),
        on_ready_change=lambda ready: None,
    )
    server = RpcServer(services=(SERVICE, ADMIN_SERVICE), limit_bytes=INTERNAL_MESSAGE_BYTES)
    servicer = EngineCoreServicer(loop, resume_ttl_s=config.engine.resume_ttl_s)
    engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, server.grpc)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(loop), server.grpc)
    port = server.bind("127.0.0.1", 0, option="engine.port")
    task = asyncio.create_task(loop.run(), name=engine_id)
    task.add_done_callback(lambda task: task.result())
    _RUNNING.add(task)
    return server, port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first engine (default: 0)")
    parser.add_argument(
        "--streams", type=int, default=64, help="rows of each engine, with --step-s (default: 64)"
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--step-s", type=float, help="wall time of a step")
    how.add_argument("--slowdown", type=float, help="wall time for each second of a step's work")
    asyncio.run(serve(parser.parse_args()))
