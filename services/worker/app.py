"""Wiring of the worker process: load on the runner thread, serve steps, leave in order."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import logging
import sys
import time
from collections.abc import Mapping

from services.worker.runner.base import PhaseChange, Runner
from services.worker.service.lease import WorkerLease
from services.worker.service.runner_thread import RunnerThread
from services.worker.service.servicer import SERVICE, WorkerServicer
from services.worker.service.sleep import SleepControl
from services.worker.service.status import StatusPublisher
from services.worker.service.watchdog import StepHung, Watchdog
from triptych.config import EngineConfig
from triptych.config.loader import shared_config
from triptych.errors import TriptychError
from triptych.internal.v1 import worker_pb2_grpc
from triptych.observe.logging import with_fields
from triptych.observe.metrics import WorkerMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.rpc.service_main import STOP_GRACE_S, ServiceApp
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import Phase, WorkerFacts

log = logging.getLogger(__name__)

# A Python thread that computes would keep the GIL for 5 ms at a time and the wire waiting: with a busy
# thread beside it a step's round trip measured 5.3 ms at the default and 0.7 ms at this.
SWITCH_INTERVAL_S = 0.0005
_DRAIN_S = 10.0  # steps in flight take milliseconds; a prefill of a large budget may take seconds
_POLL_S = 0.02


class WorkerApp(ServiceApp):
    """One accelerator's process."""

    section = "worker"
    exit_codes = ((StepHung, ExitCode.HUNG), (TriptychError, ExitCode.MISCONFIGURED))

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES, tls=self.server_tls)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._started_at = time.monotonic()
        self._metrics = WorkerMetrics.create()
        self._ready: asyncio.Future[WorkerFacts] = asyncio.get_running_loop().create_future()
        self._status_publisher = status_publisher = StatusPublisher()
        self._thread = thread = RunnerThread(
            functools.partial(_load, config),
            on_phase=lambda phase, progress: status_publisher.change(phase=phase, progress=progress),
            on_ready=self._on_loaded,
        )
        self._watchdog = Watchdog(thread.steps, hang_timeout_s=config.worker.hang_timeout_s)
        self._lease = WorkerLease(
            status_publisher, thread, shared_config(config), resume_ttl_s=config.engine.resume_ttl_s
        )
        sleep = SleepControl(self._lease, thread, status_publisher, set_ready=self.server.set_ready)
        servicer = WorkerServicer(self._lease, sleep, status_publisher, self._metrics)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.server.grpc)

    async def start(self) -> Mapping[str, int]:
        log.info("loading %s", self.config.model.model)
        self._thread.start()
        self.background["the runner thread"] = self._thread.ended
        self.start_background("the watchdog", self._watch())
        self.start_background("the report of readiness", self._report_readiness())
        return {}

    async def drain(self) -> None:
        """Finish the steps in flight; the engine goes on elsewhere with the rest."""
        log.info("stopping: finishing %d steps in flight", self._lease.num_in_flight)
        self._status_publisher.change(phase=Phase.DRAINING, progress=0.0)
        await self.server.set_ready(False)
        self._lease.drain()
        deadline = time.monotonic() + _DRAIN_S
        while self._lease.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await self.server.stop(STOP_GRACE_S)
        if (
            self._ready.done()
        ):  # a thread that loads cannot be interrupted; as a daemon it ends with the process
            await self._thread.stop(STOP_GRACE_S)

    async def stop(self) -> None:
        if not self.background["the watchdog"].done():  # else nothing can interrupt the step that hangs
            await super().stop()

    def _on_loaded(self, runner: Runner) -> None:
        gc.freeze()  # a full collection over torch's modules takes 0.1 s, in which no step is computed
        self._status_publisher.change(phase=Phase.READY, progress=1.0, facts=runner.facts)
        self._ready.set_result(runner.facts)

    async def _report_readiness(self) -> None:
        facts, metrics = await self._ready, self._metrics
        metrics.kv_blocks.set(facts.kv.num_blocks)
        metrics.weight_bytes.set(facts.weight_bytes)
        metrics.load_seconds.set(facts.load_s)
        metrics.kernels.labels(facts.kernels).set(1)
        await self.server.set_ready(True)
        log.info(
            "ready",
            extra=with_fields(
                model=facts.model.name,
                dtype=facts.model.dtype,
                device=facts.device_name,
                kernels=facts.kernels,
                kv_blocks=facts.kv.num_blocks,
                max_model_len=facts.model.max_model_len,
                after_s=time.monotonic() - self._started_at,
            ),
        )
        await asyncio.Event().wait()

    async def _watch(self) -> None:
        try:
            await self._watchdog.run()
        except StepHung:
            faulthandler.dump_traceback(sys.stderr)
            raise


def _load(config: EngineConfig, on_phase: PhaseChange) -> Runner:
    """Load the model. Runs on the runner thread, so that the event loop does not wait for the import of torch."""
    from services.worker.service.startup import load_runner

    return load_runner(config, on_phase)
