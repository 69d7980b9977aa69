"""Wiring of the engine core's process: dial the worker, run the loop, leave in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

from triptych.admin.v1 import admin_pb2_grpc
from triptych.config import EngineConfig
from triptych.config.loader import shared_config
from triptych.errors import ConfigError, StaleEpoch
from triptych.internal.v1 import engine_core_pb2_grpc
from triptych.observe.metrics import EngineMetrics
from triptych.observe.metrics.enginecore import JOURNAL_STATES, MAX_PRIORITY_LABEL
from triptych.rpc import collector
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.rpc.service_main import ServiceApp
from triptych.rpc.tls import create_client_tls
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import STATUS_ROWS, EngineStatus
from triptych.types.kv_transfer import TransferCounts
from triptych_services.enginecore.frontends.servicer import (
    ADMIN_SERVICE,
    SERVICE,
    AdminServicer,
    EngineCoreServicer,
)
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor
from triptych_services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT

log = logging.getLogger(__name__)

_POLL_S = 0.02
_METRICS_INTERVAL_S = 1.0


class EngineCoreApp(ServiceApp):
    """Scheduler and KV block manager of one model."""

    section = "engine"
    exit_codes = ((ConfigError, ExitCode.MISCONFIGURED), (StaleEpoch, ExitCode.FENCED))

    def __init__(self, config: EngineConfig) -> None:
        engine_id = config.engine.engine_id or socket.gethostname()
        config = replace(config, engine=replace(config.engine, engine_id=engine_id))
        super().__init__(config)
        self.server = RpcServer(
            services=(SERVICE, ADMIN_SERVICE), limit_bytes=INTERNAL_MESSAGE_BYTES, tls=self.server_tls
        )
        self._metrics = EngineMetrics.create()
        self._readiness: asyncio.Queue[bool] = asyncio.Queue()
        self._loop = EngineLoop(
            config=config,
            executor=GrpcExecutor(
                address=config.engine.worker_address,
                engine_id=config.engine.engine_id,
                boot_id=str(uuid.uuid4()),
                shared_config=shared_config(config),
                max_steps_in_flight=config.scheduler.steps_in_flight or MAX_STEPS_IN_FLIGHT,
                tls=create_client_tls(config.tls),
            ),
            metrics=self._metrics,
            on_ready_change=self._readiness.put_nowait,
        )
        self._servicer = EngineCoreServicer(self._loop, resume_ttl_s=config.engine.resume_ttl_s)
        engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self._servicer, self.server.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._loop), self.server.grpc)

    async def start(self) -> Mapping[str, int]:
        log.info("dialing worker %s", self.config.engine.worker_address)
        collector.freeze()
        self.start_background("engine-loop", self._loop.run())
        self.start_background(
            "garbage collector", collector.collect_when_idle(lambda: not self._loop.num_requests)
        )
        self.start_background("follow-readiness", self._follow_readiness())
        self.start_background("export-metrics", self._export_metrics())
        return {}

    async def drain(self) -> None:
        loop, drain_s = self._loop, self.config.engine.drain_s
        log.info("stopping: draining %d requests", loop.num_requests)
        loop.operator.stop_taking()
        await self.server.set_ready(False)
        deadline, running = time.monotonic() + drain_s, self.background["engine-loop"]
        while loop.num_requests and time.monotonic() < deadline and not running.done():
            await asyncio.sleep(_POLL_S)
        if loop.num_requests:
            log.warning("%d requests did not finish within engine.drain_s = %g", loop.num_requests, drain_s)

    async def stop(self) -> None:
        self._servicer.close()
        await super().stop()

    async def _follow_readiness(self) -> None:
        while True:
            await self.server.set_ready(await self._readiness.get())

    async def _export_metrics(self) -> None:
        last = None
        while True:
            last = export_status(self._metrics, self._loop.operator.status(), last)
            await asyncio.sleep(_METRICS_INTERVAL_S)


def export_status(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> EngineStatus:
    """Set the gauges, and advance the counters by what has happened since `last`.

    Returns:
        `status`, for the next call.
    """
    for name, gauge in metrics.gauges.items():
        gauge.set(STATUS_ROWS[name].read(status))
    for name, counter in metrics.counters.items():
        counter.inc(STATUS_ROWS[name].read(status) - (STATUS_ROWS[name].read(last) if last else 0))
    _export_priorities(metrics, status, last)
    _export_transfers(metrics, status, last)
    _export_groups(metrics, status, last)
    for state in JOURNAL_STATES:
        metrics.journal_state.labels(state).set(status.journal == state)
    for reason, count in status.counters.num_finished.items():
        metrics.finished.labels(reason).inc(
            count - (last.counters.num_finished.get(reason, 0) if last else 0)
        )
    return status


def _export_priorities(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> None:
    """Set the gauges of the priorities that requests wait with, and clear those of before."""
    counts = dict.fromkeys(map(_priority_label, last.num_waiting_by_priority if last else ()), 0)
    for priority, count in status.num_waiting_by_priority.items():
        label = _priority_label(priority)
        counts[label] = counts.get(label, 0) + count
    for label, count in counts.items():
        metrics.waiting_by_priority.labels(label).set(count)


def _export_groups(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> None:
    """Set the gauges of groups of layers, and advance their counters. A new worker may have other groups."""
    name_to_group = {group.name: group for group in status.groups}
    name_to_last = {group.name: group for group in last.groups} if last else {}
    for name in name_to_last.keys() - name_to_group.keys():
        metrics.groups.blocks.labels(name).set(0)
        metrics.groups.used_blocks.labels(name).set(0)
    for name, group in name_to_group.items():
        metrics.groups.blocks.labels(name).set(group.num_blocks)
        metrics.groups.used_blocks.labels(name).set(group.num_used_blocks)
        before = name_to_last.get(name)
        num_hit, num_released = (
            (before.num_hit_blocks, before.num_released_blocks) if before is not None else (0, 0)
        )
        metrics.groups.hit_blocks.labels(name).inc(group.num_hit_blocks - num_hit)
        metrics.groups.released_blocks.labels(name).inc(group.num_released_blocks - num_released)
    metrics.groups.snapshots.set(sum(group.num_snapshots for group in status.groups))


def _priority_label(priority: int) -> int:
    return max(-MAX_PRIORITY_LABEL, min(priority, MAX_PRIORITY_LABEL))


def _export_transfers(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> None:
    """Advance the counters of KV blocks that went to other workers and came from them."""
    now, before = status.kv_transfers, last.kv_transfers if last else TransferCounts()
    transfers, num_bytes = metrics.kv_transfers, metrics.kv_transfer_bytes
    transfers.labels("in", "complete").inc(now.num_in_complete - before.num_in_complete)
    transfers.labels("in", "failed").inc(now.num_in_failed - before.num_in_failed)
    transfers.labels("out", "complete").inc(now.num_out_complete - before.num_out_complete)
    transfers.labels("out", "failed").inc(now.num_out_expired - before.num_out_expired)
    for direction, num_all, num_pages in (
        ("in", now.num_in_blocks - before.num_in_blocks, now.num_in_pages - before.num_in_pages),
        ("out", now.num_out_blocks - before.num_out_blocks, now.num_out_pages - before.num_out_pages),
    ):
        num_blocks = num_all - num_pages
        num_bytes.labels(direction).inc(num_blocks * status.block_bytes + num_pages * status.page_bytes)
