"""Measures what the network between engine core and worker costs a step, beside the same in one process.

The engine loop is the real one and chooses its steps in flight itself. The worker is simulated, and each step takes
a fixed time: in a process of its own behind a proxy that delays every byte, or, as the yardstick, on a thread of the
engine's process without gRPC. Rounds of all of them take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.engine.requests import submit_of
from benchmarks.harness.cluster import simulated_config
from benchmarks.harness.command import create_parser, module_command, run
from benchmarks.harness.figures import Figure, distribution
from benchmarks.harness.processes import Child
from triptych.config import EngineConfig
from triptych.config.loader import shared_config, to_flags
from triptych.observe.metrics import EngineMetrics
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.wire.step import Step
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers.base import Connected, Executor, WorkerLost
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor
from triptych_services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.startup import load_runner

NUM_REQUESTS = 32
PROMPT_LEN = 16
READY_TIMEOUT_S = 30.0
NUM_WARM_UP_STEPS = 50  # the steps in flight are found, and all requests decode
IN_PROCESS = "in process"


class ThreadExecutor:
    """The simulated worker on a thread of this process: no servicer, no codec, no network."""

    def __init__(self, config: EngineConfig) -> None:
        self._ready = asyncio.Event()
        self._arrived: deque[StepResult | Exception] = deque()
        self._thread = RunnerThread(
            lambda on_phase: load_runner(config, on_phase),
            on_phase=lambda phase, progress: None,
            on_ready=self._on_ready,
        )
        self._thread.start()

    def _on_ready(self, runner: object) -> None:
        self._facts = runner.facts  # type: ignore[attr-defined]
        self._ready.set()

    async def connect(self, on_event: Callable[[], None], *, resume: bool) -> Connected:
        self._arrived.clear()
        await self._ready.wait()

        def deliver(outcome: StepResult | Exception) -> None:
            self._arrived.append(outcome)
            on_event()

        self._session = self._thread.open_session(deliver)
        return Connected(self._facts, self._facts.max_steps_in_flight, resume_ttl_s=0.0, is_resumed=False)

    async def send(self, plan: StepPlan) -> None:
        self._thread.submit(self._session, plan, Step())

    def receive(self) -> list[StepResult]:
        results = []
        while self._arrived:
            outcome = self._arrived.popleft()
            if isinstance(outcome, Exception):
                raise WorkerLost(str(outcome))
            results.append(outcome)
        return results

    def take_kv_progress(self) -> None:
        return None

    async def close(self) -> None:
        await self._thread.stop(1.0)


class StepTimes:
    """Passes everything on, and notes when each result was received."""

    def __init__(self, executor: Executor) -> None:
        self.received_at: list[float] = []
        self._executor = executor

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def receive(self) -> list[StepResult]:
        results = self._executor.receive()
        self.received_at += [time.perf_counter()] * len(results)
        return results


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(arguments.step_ms)
    config = replace(config, scheduler=replace(config.scheduler, steps_in_flight=arguments.steps_in_flight))
    with worker_process(config) as worker_port:
        for _ in range(arguments.rounds):
            yardstick_ms = 0.0
            for delay_ms in (None, *arguments.delays):
                name = IN_PROCESS if delay_ms is None else f"{delay_ms:g} ms one way"
                if delay_ms is None:
                    steps_s, steps_in_flight = asyncio.run(step_times(config, None, arguments.steps))
                    yardstick_ms = 1e3 * float(np.median(steps_s))
                else:
                    proxy = module_command("benchmarks.stack.delay_proxy", worker_port, delay_ms)
                    with Child(proxy) as process:
                        port = process.receive(READY_TIMEOUT_S)["port"]
                        steps_s, steps_in_flight = asyncio.run(step_times(config, port, arguments.steps))
                steps_ms = 1e3 * steps_s
                yield from distribution(f"{name}, step", "ms", steps_ms)
                yield Figure(f"{name}, steps in flight", "", (steps_in_flight,))
                if delay_ms is not None:
                    ratio = float(np.median(steps_ms)) / yardstick_ms
                    yield Figure(f"{name}, step p50 / {IN_PROCESS}", "", (ratio,))


async def step_times(config: EngineConfig, port: int | None, num_steps: int) -> tuple[np.ndarray, int]:
    """Return seconds between results, [num_steps], and the steps in flight that the engine chose.

    Args:
        port: Of the worker; None for one in this process.
    """
    if port is None:
        executor: Executor = ThreadExecutor(config)  # type: ignore[assignment] # it never sleeps
    else:
        executor = GrpcExecutor(
            address=f"127.0.0.1:{port}",
            engine_id="benchmark",
            boot_id="",
            shared_config=shared_config(config),
            max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        )
    times = StepTimes(executor)
    loop = EngineLoop(
        config=config,
        executor=times,  # type: ignore[arg-type]
        metrics=EngineMetrics.create(CollectorRegistry()),
        on_ready_change=lambda ready: None,
    )
    task = asyncio.create_task(loop.run())
    num_all_steps = NUM_WARM_UP_STEPS + num_steps
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not loop.welcome.ready:
                await asyncio.sleep(0.01)
        session, _ = loop.open_session()
        sampling = SamplingParams(max_tokens=num_all_steps + 50, ignore_eos=True)
        for number in range(NUM_REQUESTS):
            loop.submit(session, submit_of(number, PROMPT_LEN, sampling))
        while len(times.received_at) <= num_all_steps:
            await asyncio.sleep(0.05)
            if task.done():
                task.result()
        return np.diff(
            times.received_at[NUM_WARM_UP_STEPS : num_all_steps + 1]
        ), loop.operator.status().steps_in_flight
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextmanager
def worker_process(config: EngineConfig) -> Iterator[int]:
    """Run a simulated worker until the block ends; yields its port."""
    with tempfile.TemporaryDirectory() as directory:
        ready_file = Path(directory, "ready.json")
        with Child(
            module_command("triptych_services.worker", *to_flags(config), f"--ready-file={ready_file}")
        ):
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not ready_file.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield json.loads(ready_file.read_text())["port"]


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=4)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of a simulated step (default: 5)")
    parser.add_argument("--steps", type=int, default=500, help="of each case in a round (default: 500)")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.2, 1.0, 4.0], help="ms, one way")
    parser.add_argument("--steps-in-flight", type=int, default=0, help="0: the engine chooses (default)")
    sys.exit(run(parser, measure))
