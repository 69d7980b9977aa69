"""Many engines in one process, each with its own port and scheduler; accelerators are simulated at slowed time.

Writes the ports as JSON, then answers each line on stdin with the steps, tokens and CPU seconds so far. Steps take
`--step-s` of wall time, however much they compute: what the process spends on them is the engines' own work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from triptych.admin.v1 import admin_pb2_grpc
from triptych.config import EngineConfig
from triptych.config.step_times import StepTimeModel
from triptych.errors import EngineUnavailable
from triptych.hub import resolve_model
from triptych.internal.v1 import engine_core_pb2_grpc
from triptych.launcher.launch import config_from_overrides
from triptych.observe.metrics import EngineMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
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
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner, create_simulated_runner

_STEPS_IN_FLIGHT = 2
BLOCK_SIZE = 16
_RUNNING: set[asyncio.Task[None]] = set()


class SlowedWorker:
    """An `Executor` whose steps are computed at once and come back in their turn, each `step_s` after the last."""

    address = "simulated"
    session_name = ""

    def __init__(self, runner: SimulatedRunner, step_s: float) -> None:
        self.num_steps = self.num_tokens = 0
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
        self._free_at = max(self._free_at, loop.time()) + self._step_s
        loop.call_at(self._free_at, self._finish, result)

    def receive(self) -> list[StepResult]:
        """See `Executor`."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_kv_progress(self) -> None:
        """See `Executor`."""

    async def call(self, method: str, *, timeout_s: float, **fields: object) -> Any:
        """See `Executor`."""
        raise EngineUnavailable(f"{method}: nobody calls the worker here")

    async def close(self) -> None:
        """See `Executor`."""

    def _finish(self, result: StepResult) -> None:
        self.num_steps += 1
        self.num_tokens += len(result.token_ids)
        self._arrived.append(result)
        self._on_event()


async def serve(arguments: argparse.Namespace) -> None:
    """Run the engines until stdin is closed."""
    wake_timer.TICK_S = max(wake_timer.TICK_S, arguments.step_s)  # time is slowed, and so are timers
    terms = ("base_ms", "prefill_token_us", "decode_row_us", "context_token_ns")
    config = config_from_overrides(
        {
            "simulation.enabled": True,
            **{f"simulation.{term}": 0 for term in terms},
            "max_num_seqs": arguments.streams,
            "max_model_len": arguments.max_model_len,
            "num_blocks": arguments.streams * (arguments.max_model_len // BLOCK_SIZE + 1) + 1,
        }
    )
    facts = create_simulated_runner(
        config, resolve_model(config.model.model), boot_id="scale", on_phase=lambda phase, progress: None
    ).facts
    words = np.arange(100, 1000)
    device = SimulatedDevice(StepTimeModel(0, 0, 0, 0))
    workers, servers, ports = [], [], []
    for number in range(arguments.first, arguments.first + arguments.engines):
        worker = SlowedWorker(SimulatedRunner(facts=facts, device=device, word_ids=words), arguments.step_s)
        server, port = create_engine(config, f"engine-{number}", worker)
        await server.start()
        workers.append(worker)
        servers.append(server)
        ports.append(port)
    print(json.dumps({"ports": ports}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        counts = {
            "steps": sum(worker.num_steps for worker in workers),
            "tokens": sum(worker.num_tokens for worker in workers),
            "cpu_s": time.process_time(),
        }
        print(json.dumps(counts), flush=True)
    print("{}", flush=True)


def create_engine(config: EngineConfig, engine_id: str, worker: SlowedWorker) -> tuple[RpcServer, int]:
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
    parser.add_argument("--streams", type=int, default=64, help="rows of each engine (default: 64)")
    parser.add_argument("--max-model-len", type=int, default=256, help="default: 256")
    parser.add_argument("--step-s", type=float, default=1.0, help="wall time of a step (default: 1)")
    asyncio.run(serve(parser.parse_args()))
