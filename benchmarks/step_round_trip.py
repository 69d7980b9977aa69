"""What a step costs on the wire: plan sent to result received, between two processes over loopback gRPC.

    python benchmarks/step_round_trip.py

The worker's door, session and runner thread are the real ones; its runner computes nothing. So the figure is
encoding, gRPC, decoding and two changes of thread, and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.enginecore.workers.grpc_executor import GrpcExecutor
from services.worker.app import SWITCH_INTERVAL_S
from services.worker.runner.base import CompletedStep
from services.worker.service.lease import WorkerLease
from services.worker.service.runner_thread import RunnerThread
from services.worker.service.servicer import SERVICE, WorkerServicer
from services.worker.service.sleep import SleepControl
from services.worker.service.status import StatusPublisher
from triptych.internal.v1 import worker_pb2_grpc
from triptych.observe.metrics import WorkerMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.types.facts import KvShape, ModelFacts, Phase, WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult

NUM_ROWS = (1, 64, 256)
_FACTS = WorkerFacts(
    boot_id="none",
    model=ModelFacts("none", "0" * 64, 50_000, 4096, (), "float32", "float32", "none"),
    kv=KvShape(100_000, 16, 1, 1, 1, "float32"),
    max_num_seqs=max(NUM_ROWS),
    max_num_batched_tokens=8192,
    max_steps_in_flight=4,
)


class IdleRunner:
    """Answers every live row with a token, at once."""

    facts = _FACTS

    def __init__(self) -> None:
        self._num_rows = 0

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_rows += len(plan.new_rows)
        return StepResult(plan.step_id, np.full(self._num_rows, 7, np.uint32))

    def reset(self) -> None:
        self._num_rows = 0


async def serve() -> None:
    """The worker's process: print the port, then serve until killed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES)
    status_publisher = StatusPublisher()
    thread = RunnerThread(
        lambda on_phase: IdleRunner(),
        on_phase=lambda phase, progress: None,
        on_ready=lambda runner: status_publisher.change(phase=Phase.READY, facts=_FACTS),
    )
    lease = WorkerLease(status_publisher, thread, {}, resume_ttl_s=0.0)
    sleep = SleepControl(lease, thread, status_publisher, set_ready=server.set_ready)
    servicer = WorkerServicer(lease, sleep, status_publisher, WorkerMetrics.create(CollectorRegistry()))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    port = server.bind("127.0.0.1", 0, option="worker.port")
    await server.start()
    thread.start()
    print(port, flush=True)
    await asyncio.Event().wait()


async def measure(port: int, num_rows: int, steps_in_flight: int, num_steps: int) -> np.ndarray:
    """[num_steps] seconds from plan sent to result received, with `steps_in_flight` steps in flight."""
    executor = GrpcExecutor(
        address=f"127.0.0.1:{port}",
        engine_id="benchmark",
        epoch=1,
        shared_config={},
        steps_in_flight=steps_in_flight,
    )
    news = asyncio.Event()
    await executor.connect(news.set)
    sent_at: deque[float] = deque()
    seconds: list[float] = []
    step_id = 0
    while len(seconds) < num_steps:
        while len(sent_at) < steps_in_flight:
            step_id += 1
            sent_at.append(time.perf_counter())
            await executor.send(_plan(step_id, len(seconds), num_rows if step_id == 1 else 0))
        news.clear()
        results = executor.receive()
        if not results:
            await news.wait()
        for _ in results:
            seconds.append(time.perf_counter() - sent_at.popleft())
    await executor.close()
    return np.array(seconds[num_steps // 10 :])  # the first steps warm up


def _plan(step_id: int, last_result_seen: int, num_new: int) -> StepPlan:
    content, emitted = RowContent(np.zeros(1, np.uint32), SamplingParams()), np.zeros(1, np.uint32)
    rows = tuple(
        NewRow(slot, 0, content, emitted, 1, 1, np.array([slot + 1], np.uint32), 0) for slot in range(num_new)
    )
    return StepPlan(step_id=step_id, last_result_seen=last_result_seen, new_rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="per round (default: 2000)")
    parser.add_argument("--rounds", type=int, default=3, help="medians are taken over them (default: 3)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        port = int(worker.stdout.readline())
        print(f"{'rows':>6} {'steps_in_flight':>6} {'p50 us':>8} {'p99 us':>8} {'us/step':>8}")
        for num_rows in NUM_ROWS:
            for steps_in_flight in (1, 2):
                rounds = []
                for _ in range(arguments.rounds):
                    started = time.perf_counter()
                    seconds = asyncio.run(measure(port, num_rows, steps_in_flight, arguments.steps))
                    per_step = (time.perf_counter() - started) / arguments.steps
                    rounds.append((*np.percentile(seconds, [50, 99]), per_step))
                p50, p99, per_step = np.median(rounds, axis=0) * 1e6
                print(f"{num_rows:>6} {steps_in_flight:>6} {p50:>8.0f} {p99:>8.0f} {per_step:>8.0f}")
        worker.terminate()


if __name__ == "__main__":
    main()
