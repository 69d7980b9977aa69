"""Measures a step on the wire: plan sent to result received, between two processes over loopback gRPC.

The worker's servicer, session and runner thread are the real ones; its runner computes nothing. So the figures are
encoding, gRPC, decoding and two changes of thread, and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.engine.requests import worker_facts
from benchmarks.harness.command import create_parser, module_command, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Answers, Child
from triptych.config import EngineConfig
from triptych.internal.v1 import worker_pb2_grpc
from triptych.observe.metrics import WorkerMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.types.facts import Phase
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor
from triptych_services.worker.runner.base import CompletedStep, do_nothing
from triptych_services.worker.service.adapters import AdapterControl, RankAdapters
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.runner_app import SWITCH_INTERVAL_S
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.servicer import SERVICE, WorkerServicer
from triptych_services.worker.service.sleep import SleepControl
from triptych_services.worker.service.status import StatusPublisher

NUM_ROWS = (1, 64, 256)
STEPS_IN_FLIGHT = (1, 2)
START_TIMEOUT_S = 60.0
_FACTS = worker_facts(
    num_blocks=100_000, max_model_len=4096, max_num_seqs=max(NUM_ROWS), max_num_batched_tokens=8192
)


class IdleRunner:
    """Answers every live row with a token at once."""

    facts = _FACTS

    def __init__(self) -> None:
        self._num_rows = 0

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:
        on_prepared()
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_rows += len(plan.new_rows)
        return StepResult(plan.step_id, np.full(self._num_rows, 7, np.uint32))

    def reset(self) -> None:
        self._num_rows = 0


async def serve() -> None:
    """Run the worker's process: say the port, then serve until killed."""
    answers = Answers()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES)
    status_publisher = StatusPublisher()
    thread = RunnerThread(
        lambda on_phase: IdleRunner(),  # type: ignore[arg-type, return-value] # it never sleeps
        on_phase=lambda phase, progress: None,
        on_ready=lambda runner: status_publisher.change(phase=Phase.READY, facts=_FACTS),
    )
    lease = WorkerLease(status_publisher, thread, {}, resume_ttl_s=0.0)
    sleep = SleepControl(lease, thread, status_publisher, set_ready=server.set_ready)
    adapters = AdapterControl(RankAdapters(EngineConfig(), lambda: None, thread))
    metrics = WorkerMetrics.create(CollectorRegistry())
    servicer = WorkerServicer(lease, sleep, adapters, status_publisher, metrics)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    port = server.bind("127.0.0.1", 0, option="worker.port")
    await server.start()
    thread.start()
    answers.write({"port": port})
    await asyncio.Event().wait()


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    with Child(module_command("benchmarks.worker.step_round_trip", "--serve")) as worker:
        port = worker.receive(START_TIMEOUT_S)["port"]
        for _ in range(arguments.rounds):
            for num_rows in NUM_ROWS:
                for steps_in_flight in STEPS_IN_FLIGHT:
                    started_s = time.perf_counter()
                    trips_s = asyncio.run(round_trips_s(port, num_rows, steps_in_flight, arguments.steps))
                    step_s = (time.perf_counter() - started_s) / arguments.steps
                    title = f"{num_rows} rows, {steps_in_flight} in flight"
                    for name, value_s in zip(("p50", "p99"), np.percentile(trips_s, [50, 99]), strict=True):
                        yield Figure(f"{title}, round trip {name}", "us", (1e6 * float(value_s),))
                    yield Figure(f"{title}, time per step", "us", (1e6 * step_s,))


async def round_trips_s(port: int, num_rows: int, steps_in_flight: int, num_steps: int) -> np.ndarray:
    """Return the seconds from plan sent to result received, without those of the first tenth of the steps."""
    executor = GrpcExecutor(
        address=f"127.0.0.1:{port}",
        engine_id="benchmark",
        boot_id="",
        shared_config={},
        max_steps_in_flight=steps_in_flight,
    )
    arrived = asyncio.Event()
    await executor.connect(arrived.set, resume=False)
    sent_at: deque[float] = deque()
    trips_s: list[float] = []
    step_id = 0
    while len(trips_s) < num_steps:
        while len(sent_at) < steps_in_flight:
            step_id += 1
            rows = _new_rows(num_rows) if step_id == 1 else ()
            sent_at.append(time.perf_counter())
            await executor.send(StepPlan(step_id=step_id, last_result_seen=len(trips_s), new_rows=rows))
        arrived.clear()
        results = executor.receive()
        if not results:
            await arrived.wait()
        for _ in results:
            trips_s.append(time.perf_counter() - sent_at.popleft())
    await executor.close()
    return np.array(trips_s[num_steps // 10 :])


def _new_rows(count: int) -> tuple[NewRow, ...]:
    content, emitted = RowContent(np.zeros(1, np.uint32), SamplingParams()), np.zeros(1, np.uint32)
    return tuple(
        NewRow(slot, 0, content, emitted, 1, 1, np.array([slot + 1], np.uint32), 0) for slot in range(count)
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=2000, help="of a round (default: 2000)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().serve:
        asyncio.run(serve())
    sys.exit(run(parser, measure))
