"""Wiring of the worker process: bind, load on the runner thread, serve steps, leave in order."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import sys
import time
from typing import Any

from services.worker.runner.base import Runner
from services.worker.service.lease import WorkerLease
from services.worker.service.runner_thread import PhaseChange, RunnerThread
from services.worker.service.servicer import SERVICE, WorkerServicer
from services.worker.service.sleep import SleepControl
from services.worker.service.status import StatusPublisher
from services.worker.service.watchdog import StepHung, Watchdog
from triptych.config.loader import ServiceArguments, shared_config
from triptych.errors import TriptychError
from triptych.internal.v1 import worker_pb2_grpc
from triptych.observe import logging as observe_logging
from triptych.observe.logging import with_fields
from triptych.observe.metrics import WorkerMetrics, serve_metrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer, stop_event, write_ready_file
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import Phase

log = logging.getLogger(__name__)

# A Python thread that computes would keep the GIL for 5 ms at a time and the wire waiting: with a busy
# thread beside it a step's round trip measured 5.3 ms at the default and 0.7 ms at this.
SWITCH_INTERVAL_S = 0.0005
_STOP_GRACE_S = 1.0
_DRAIN_S = 10.0  # steps in flight take milliseconds; a prefill of a large budget may take seconds
_POLL_S = 0.02


async def run(arguments: ServiceArguments) -> int:
    """Serve until SIGTERM; returns the exit code."""
    started = time.monotonic()
    config = arguments.config
    observe_logging.configure(config.log, "worker")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = stop_event()
    server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES)
    status_publisher, metrics = StatusPublisher(), WorkerMetrics.create()

    def on_phase(phase: str, progress: float) -> None:
        status_publisher.change(phase=phase, progress=progress)

    ready = asyncio.Event()

    def on_ready(runner: Runner) -> None:
        status_publisher.change(phase=Phase.READY, progress=1.0, facts=runner.facts)
        ready.set()

    thread = RunnerThread(functools.partial(_load, arguments), on_phase=on_phase, on_ready=on_ready)
    lease = WorkerLease(
        status_publisher, thread, shared_config(config), resume_ttl_s=config.engine.resume_ttl_s
    )
    watchdog = Watchdog(thread.steps, hang_timeout_s=config.worker.hang_timeout_s)
    sleep = SleepControl(lease, thread, status_publisher, set_ready=server.set_ready)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerServicer(lease, sleep, status_publisher, metrics), server.grpc
    )
    port = server.bind(config.worker.host, config.worker.port, option="worker.port")
    metrics_port = serve_metrics(config.worker.host, config.worker.metrics_port, option="worker.metrics_port")
    await server.start()
    write_ready_file(arguments.ready_file, {"port": port, "metrics_port": metrics_port})
    log.info("listening on %s:%d, loading %s", config.worker.host, port, config.model.model)
    thread.start()

    waiters: list[asyncio.Future[Any]] = [asyncio.create_task(event.wait()) for event in (ready, stop)]
    watching = asyncio.create_task(watchdog.run(), name="watchdog")
    ends: list[asyncio.Future[Any]] = [thread.ended, watching]
    await asyncio.wait([*waiters, *ends], return_when=asyncio.FIRST_COMPLETED)
    if ready.is_set() and status_publisher.state.facts is not None:
        facts = status_publisher.state.facts
        metrics.kv_blocks.set(facts.kv.num_blocks)
        metrics.weight_bytes.set(facts.weight_bytes)
        metrics.load_seconds.set(facts.load_s)
        metrics.kernels.labels(facts.kernels).set(1)
        await server.set_ready(True)
        log.info(
            "ready",
            extra=with_fields(
                model=facts.model.name,
                dtype=facts.model.dtype,
                device=facts.device_name,
                kernels=facts.kernels,
                kv_blocks=facts.kv.num_blocks,
                max_model_len=facts.model.max_model_len,
                after_s=time.monotonic() - started,
            ),
        )
        await asyncio.wait([waiters[1], *ends], return_when=asyncio.FIRST_COMPLETED)
    for waiter in waiters:
        waiter.cancel()
    if watching.done():
        return await _give_up(server, watching)
    if thread.ended.done():
        return await _fail(server, thread)
    await _drain(server, status_publisher, lease)
    watching.cancel()
    if ready.is_set():  # while it loads, the thread cannot be interrupted; as a daemon it ends with us
        await thread.stop(_STOP_GRACE_S)
        if thread.ended.done() and thread.ended.exception() is not None:
            return await _fail(server, thread)
    log.info("stopped")
    return ExitCode.OK


def _load(arguments: ServiceArguments, on_phase: PhaseChange) -> Runner:
    """Runs on the runner thread, which alone pays for importing torch."""
    from services.worker.service.startup import load_runner

    return load_runner(arguments.config, on_phase)


async def _drain(server: RpcServer, status_publisher: StatusPublisher, lease: WorkerLease) -> None:
    """Leave the load balancer, finish the steps in flight; the engine goes on elsewhere with the rest."""
    log.info("stopping: finishing %d steps in flight", lease.num_in_flight)
    status_publisher.change(phase=Phase.DRAINING, progress=0.0)
    await server.set_ready(False)
    lease.drain()
    deadline = time.monotonic() + _DRAIN_S
    while lease.num_in_flight and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    await server.stop(_STOP_GRACE_S)


async def _give_up(server: RpcServer, watching: asyncio.Future[None]) -> int:
    """Leave although a step is in hand: nothing can interrupt it, and the engine goes on with another worker."""
    error = watching.exception()
    if not isinstance(error, StepHung):
        log.error("the watchdog died: %r", error, exc_info=error)
        await server.set_dead()
        return ExitCode.FAILED
    log.error("%s; this is where it stands:", error)
    faulthandler.dump_traceback(sys.stderr)
    await server.set_dead()
    return ExitCode.HUNG


async def _fail(server: RpcServer, thread: RunnerThread) -> int:
    error = thread.ended.exception()
    await server.set_dead()
    await server.stop(_STOP_GRACE_S)
    if isinstance(error, TriptychError):
        log.error("cannot serve: %s", error)
        return ExitCode.MISCONFIGURED
    log.error("the runner thread died: %r", error, exc_info=error)
    return ExitCode.FAILED
