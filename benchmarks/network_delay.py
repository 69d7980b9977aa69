"""What the network between engine core and worker costs a step: ms per step over it / in the same process.

    python benchmarks/network_delay.py [--step-ms 5] [--steps 2000] [--delays 0 0.2 1 4]

The engine loop is the real one and chooses its window itself; the worker is a simulated one whose steps take a
fixed time, in a process of its own behind a proxy that delays every byte, or, as the yardstick, on a thread of
the engine's process with no gRPC at all. Rounds of all of them take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.enginecore.loop import EngineLoop
from services.enginecore.workers.base import Connected, Executor, WorkerLost
from services.enginecore.workers.grpc_executor import GrpcExecutor
from services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT
from services.worker.service.runner_thread import RunnerThread
from services.worker.service.startup import load_runner
from triptych.config import EngineConfig
from triptych.config.loader import to_flags
from triptych.config.shared import shared_config
from triptych.observe.metrics import EngineMetrics
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import SubmitRequest, single_choice

ROOT = Path(__file__).resolve().parents[1]
NUM_REQUESTS = 32
PROMPT_LEN = 16
READY_TIMEOUT_S = 30.0
NUM_WARM_UP_STEPS = 50  # the window is found, and all requests decode

Seconds = NDArray[np.float64]


class ThreadExecutor:
    """The simulated worker on a thread of this process: no door, no codec, no network."""

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

    async def connect(self, on_event: Callable[[], None]) -> Connected:
        await self._ready.wait()

        def deliver(outcome: StepResult | Exception) -> None:
            self._arrived.append(outcome)
            on_event()

        self._session = self._thread.open_session(deliver)
        return Connected(self._facts, MAX_STEPS_IN_FLIGHT, resume_ttl_s=0.0, is_resumed=False)

    def forget_session(self) -> None:
        self._arrived.clear()

    async def send(self, plan: StepPlan) -> None:
        self._thread.submit(self._session, plan)

    def receive(self) -> list[StepResult]:
        results = []
        while self._arrived:
            outcome = self._arrived.popleft()
            if isinstance(outcome, Exception):
                raise WorkerLost(str(outcome))
            results.append(outcome)
        return results

    async def close(self) -> None:
        await self._thread.stop(1.0)


class StepTimes:
    """Passes everything on, and notes when each result was taken in."""

    def __init__(self, executor: Executor) -> None:
        self.taken_at: list[float] = []
        self._executor = executor

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def receive(self) -> list[StepResult]:
        results = self._executor.receive()
        self.taken_at += [time.perf_counter()] * len(results)
        return results


async def measure(config: EngineConfig, port: int | None, num_steps: int) -> tuple[Seconds, int]:
    """[num_steps] seconds between results, and the window chosen; `port` None: in this process."""
    if port is None:
        executor: Executor = ThreadExecutor(config)
    else:
        executor = GrpcExecutor(
            address=f"127.0.0.1:{port}",
            engine_id="benchmark",
            epoch=time.time_ns() // 1_000_000,
            shared_config=shared_config(config),
            steps_in_flight=MAX_STEPS_IN_FLIGHT,
        )
    times = StepTimes(executor)
    loop = EngineLoop(
        config=config,
        executor=times,  # type: ignore[arg-type]
        epoch=1,
        metrics=EngineMetrics.create(CollectorRegistry()),
        on_ready_change=lambda ready: None,
    )
    task = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not loop.welcome.ready:
                await asyncio.sleep(0.01)
        session, _ = loop.open_session()
        for number in range(NUM_REQUESTS):
            loop.submit(session, _submit(number, NUM_WARM_UP_STEPS + num_steps + 50))
        while len(times.taken_at) <= NUM_WARM_UP_STEPS + num_steps:
            await asyncio.sleep(0.05)
            if task.done():
                task.result()
        taken_at = np.array(times.taken_at[NUM_WARM_UP_STEPS : NUM_WARM_UP_STEPS + num_steps + 1])
        return np.diff(taken_at), loop.status().steps_in_flight
    finally:
        task.cancel()
        await asyncio.wait([task])


def _submit(number: int, max_tokens: int) -> SubmitRequest:
    return single_choice(
        number,
        str(number),
        np.full(PROMPT_LEN, 100 + number, np.uint32),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=number,
    )


@contextmanager
def worker_process(config: EngineConfig) -> Iterator[int]:
    """A simulated worker; its port."""
    with tempfile.TemporaryDirectory() as directory:
        ready_file = Path(directory, "ready.json")
        flags = to_flags(config)
        command = [sys.executable, "-m", "services.worker", *flags, f"--ready-file={ready_file}"]
        with subprocess.Popen(command, cwd=ROOT) as process:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not ready_file.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield json.loads(ready_file.read_text())["port"]
            process.terminate()


@contextmanager
def proxy_process(port: int, delay_ms: float) -> Iterator[int]:
    """A delay in front of `port`; its own port."""
    command = [sys.executable, str(ROOT / "benchmarks/delay_proxy.py"), str(port), str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=5.0, help="of a simulated step (default: 5)")
    parser.add_argument("--steps", type=int, default=2000, help="of each kind, all rounds together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.2, 1.0, 4.0], help="ms, one way")
    parser.add_argument("--window", type=int, default=0, help="0: the engine chooses (default)")
    arguments = parser.parse_args()
    config = EngineConfig()
    config = replace(
        config,
        simulation=replace(
            config.simulation,
            enabled=True,
            base_ms=arguments.step_ms,
            prefill_token_us=0.0,
            decode_row_us=0.0,
            context_token_ns=0.0,
        ),
        scheduler=replace(config.scheduler, steps_in_flight=arguments.steps_in_flight),
        worker=replace(config.worker, port=0, metrics_port=0),
        log=replace(config.log, level="warning"),
    )
    steps_per_round = arguments.steps // arguments.rounds
    intervals: dict[str, list[Seconds]] = {}
    windows: dict[str, int] = {}
    with worker_process(config) as worker_port:
        for _ in range(arguments.rounds):
            for delay_ms in (None, *arguments.delays):
                if delay_ms is None:
                    name, measured = "in process", asyncio.run(measure(config, None, steps_per_round))
                else:
                    with proxy_process(worker_port, delay_ms) as port:
                        name, measured = (
                            f"{delay_ms:g} ms",
                            asyncio.run(measure(config, port, steps_per_round)),
                        )
                intervals.setdefault(name, []).append(measured[0])
                windows[name] = measured[1]
    yardstick = {name: np.concatenate(parts) * 1e3 for name, parts in intervals.items()}
    base = np.median(yardstick["in process"])
    print(
        f"{'one way':>10} {'steps_in_flight':>6} {'p50 ms':>8} {'p99 ms':>8} {'mean ms':>8} {'p50 / in process':>17}"
    )
    for name, milliseconds in yardstick.items():
        p50, p99 = np.percentile(milliseconds, [50, 99])
        print(
            f"{name:>10} {windows[name]:>6} {p50:>8.3f} {p99:>8.3f} {milliseconds.mean():>8.3f} {p50 / base:>17.3f}"
        )


if __name__ == "__main__":
    main()
