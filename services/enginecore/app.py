"""Wiring of the engine core's process: bind, dial the worker, run the loop, leave in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from services.enginecore.frontends.servicer import ADMIN_SERVICE, SERVICE, AdminServicer, EngineCoreServicer
from services.enginecore.loop import EngineLoop
from services.enginecore.workers.grpc_executor import GrpcExecutor
from services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT
from triptych.config.loader import ServiceArguments, shared_config
from triptych.errors import ConfigError, StaleEpoch
from triptych.internal.v1 import engine_core_pb2_grpc
from triptych.observe import logging as observe_logging
from triptych.observe.metrics import EngineMetrics, serve_metrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer, stop_event, write_ready_file
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import EngineStatus
from triptych.v1 import admin_pb2_grpc

log = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_POLL_S = 0.02
_METRICS_INTERVAL_S = 1.0


async def run(arguments: ServiceArguments) -> int:
    """Serve until SIGTERM; returns the exit code."""
    config = arguments.config
    observe_logging.configure(config.log, "engine")
    stop = stop_event()
    epoch = time.time_ns() // 1_000_000
    metrics = EngineMetrics.create()
    server = RpcServer(services=(SERVICE, ADMIN_SERVICE), limit_bytes=INTERNAL_MESSAGE_BYTES)
    readiness: asyncio.Queue[bool] = asyncio.Queue()
    loop = EngineLoop(
        config=config,
        executor=GrpcExecutor(
            address=config.engine.worker_address,
            engine_id=config.engine.engine_id,
            epoch=epoch,
            shared_config=shared_config(config),
            max_steps_in_flight=config.scheduler.steps_in_flight or MAX_STEPS_IN_FLIGHT,
        ),
        epoch=epoch,
        metrics=metrics,
        on_ready_change=readiness.put_nowait,
    )
    servicer = EngineCoreServicer(loop, resume_ttl_s=config.engine.resume_ttl_s)
    engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, server.grpc)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(loop), server.grpc)
    port = server.bind(config.engine.host, config.engine.port, option="engine.port")
    metrics_port = serve_metrics(config.engine.host, config.engine.metrics_port, option="engine.metrics_port")
    await server.start()
    write_ready_file(arguments.ready_file, {"port": port, "metrics_port": metrics_port})
    log.info("listening on %s:%d, worker %s", config.engine.host, port, config.engine.worker_address)

    gc.freeze()  # modules and wiring live as long as the process: no collection need look at them again
    tasks = (
        asyncio.create_task(loop.run(), name="engine-loop"),
        asyncio.create_task(_follow_readiness(server, readiness), name="follow-readiness"),
        asyncio.create_task(_export_metrics(loop, metrics), name="export-metrics"),
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping in done:
        await _drain(server, loop, config.engine.drain_s, tasks[0])
    code: int = ExitCode.OK
    if dead := [task for task in tasks if task.done()]:  # none ends by itself unless something is wrong
        code = await _report_death(server, dead[0])
    servicer.close()
    await server.stop(_STOP_GRACE_S)
    for task in (*tasks, stopping):
        task.cancel()
    await asyncio.wait((*tasks, stopping))
    log.info("stopped")
    return code


async def _follow_readiness(server: RpcServer, readiness: asyncio.Queue[bool]) -> None:
    while True:
        await server.set_ready(await readiness.get())


async def _export_metrics(loop: EngineLoop, metrics: EngineMetrics) -> None:
    last = None
    while True:
        last = _export_status(metrics, loop.status(), last)
        await asyncio.sleep(_METRICS_INTERVAL_S)


def _export_status(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> EngineStatus:
    """Set the gauges, and advance the counters by what has happened since `last`.

    Returns:
        `status`, for the next call.
    """
    metrics.running.set(status.num_running)
    metrics.waiting.set(status.num_waiting)
    metrics.used_blocks.set(status.num_used_blocks)
    metrics.blocks.set(status.num_blocks)
    metrics.asleep.set(status.asleep)
    for counter, name in (
        (metrics.steps, "num_steps"),
        (metrics.scheduled_tokens, "num_scheduled_tokens"),
        (metrics.preemptions, "num_preemptions"),
        (metrics.prefix_queries, "prefix_queries"),
        (metrics.prefix_hits, "prefix_hits"),
    ):
        counter.inc(getattr(status, name) - (getattr(last, name) if last else 0))
    for reason, count in status.num_finished.items():
        metrics.finished.labels(reason).inc(count - (last.num_finished.get(reason, 0) if last else 0))
    return status


async def _drain(server: RpcServer, loop: EngineLoop, drain_s: float, loop_task: asyncio.Task[None]) -> None:
    """Leave the load balancer, let what is alive finish."""
    log.info("stopping: draining %d requests", loop.num_requests)
    loop.stop_taking()
    await server.set_ready(False)
    deadline = time.monotonic() + drain_s
    while loop.num_requests and time.monotonic() < deadline and not loop_task.done():
        await asyncio.sleep(_POLL_S)
    if loop.num_requests:
        log.warning("%d requests did not finish within engine.drain_s = %g", loop.num_requests, drain_s)


async def _report_death(server: RpcServer, task: asyncio.Task[None]) -> int:
    error = task.exception()
    await server.set_dead()
    if isinstance(error, ConfigError):
        log.error("cannot serve: %s", error)
        return ExitCode.MISCONFIGURED
    if isinstance(error, StaleEpoch):
        log.error("fenced: %s", error)
        return ExitCode.FENCED
    log.error("%s died: %r", task.get_name(), error, exc_info=error)
    return ExitCode.FAILED
