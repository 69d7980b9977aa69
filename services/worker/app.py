"""Wiring of the worker's process that the engine dials: load on the runner thread, serve steps, leave in order.

Where several ranks compute the model, this is rank 0, which relays to the others; `follower_app` is theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

from triptych.config import EngineConfig
from triptych.config.loader import shared_config
from triptych.errors import ConfigError
from triptych.internal.v1 import worker_pb2_grpc
from triptych.rpc.service_main import STOP_GRACE_S, ServiceApp
from triptych.types.facts import Phase
from triptych_services.worker.follower_app import FollowerApp
from triptych_services.worker.group.leader import GroupLeader
from triptych_services.worker.group.leader_thread import LeaderAdapters, LeaderThread
from triptych_services.worker.kv_transfer.service import KvTransferService, check_kv_transfer
from triptych_services.worker.service.adapters import AdapterControl, RankAdapters
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.runner_app import RunnerApp
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.servicer import WorkerServicer
from triptych_services.worker.service.sleep import SleepControl

log = logging.getLogger(__name__)

_DRAIN_S = 10.0  # steps in flight take milliseconds; a prefill of a large budget may take seconds
_POLL_S = 0.02


class WorkerApp(RunnerApp):
    """The process of one accelerator, or of the first of several."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        check_kv_transfer(config)
        self._leader: GroupLeader | None = None
        if config.parallel.num_ranks > 1:
            self._leader = GroupLeader(
                config.parallel,
                generation=str(uuid.uuid4()),
                on_leaving=lambda: os.kill(os.getpid(), signal.SIGTERM),
            )
        self._thread = thread = self._create_thread()
        self._lease = WorkerLease(
            self.status_publisher, thread, shared_config(config), resume_ttl_s=config.engine.resume_ttl_s
        )
        sleep = SleepControl(self._lease, thread, self.status_publisher, set_ready=self.server.set_ready)
        adapters = AdapterControl(self._create_adapters())
        servicer = WorkerServicer(self._lease, sleep, adapters, self.status_publisher, self.metrics)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.server.grpc)

    @classmethod
    def for_config(cls, config: EngineConfig) -> type[ServiceApp]:
        """Return the app of the rank that this process is. Raises ConfigError if there is no such rank."""
        rank, num_ranks = config.worker.rank, config.parallel.num_ranks
        if rank >= num_ranks:
            raise ConfigError(
                f"worker.rank: {rank}, but parallel.tensor_parallel_size * parallel.pipeline_parallel_size = "
                f"{num_ranks} ranks are numbered from 0"
            )
        return FollowerApp if rank > 0 else cls

    async def start(self) -> Mapping[str, int]:
        ports = {}
        if self._leader is not None:
            ports["rendezvous_port"] = await self._leader.open()
            self.start_background("the group", self._lead(self._leader))
        self.start_thread(self._thread)
        self.start_background("the report of readiness", self._report_readiness())
        return ports

    async def drain(self) -> None:
        """Finish the steps in flight; the engine goes on elsewhere with the rest."""
        log.info("stopping: finishing %d steps in flight", self._lease.num_in_flight)
        self.status_publisher.change(phase=Phase.DRAINING, progress=0.0)
        await self.server.set_ready(False)
        self._lease.drain()
        deadline = time.monotonic() + _DRAIN_S
        while self._lease.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await self.server.stop(STOP_GRACE_S)
        if self._leader is not None:
            await self._leader.leave()
        await self.stop_thread(self._thread)

    def _create_thread(self) -> RunnerThread:
        if self._leader is None:
            return RunnerThread(self.loader(None), on_phase=self.on_phase, on_ready=self.on_loaded)
        return LeaderThread(
            self._leader, self.loader(self._leader.place), on_phase=self.on_phase, on_ready=self.on_loaded
        )

    def _create_adapters(self) -> RankAdapters:
        if self._leader is None:
            return RankAdapters(self.config, lambda: self.runner, self._thread)
        return LeaderAdapters(self._leader, self.config, lambda: self.runner, self._thread)

    async def _lead(self, leader: GroupLeader) -> None:
        await leader.gather()
        await asyncio.Event().wait()

    async def _report_readiness(self) -> None:
        facts = await self.ready
        if self._leader is not None:
            await self._leader.wait_ready(facts.kv.num_blocks)
        if self.config.worker.kv_transfer:
            assert self.runner is not None, "it has loaded"
            transfers = KvTransferService(self.config, facts, self.runner.block_store)
            self._lease.kv_transfers = transfers
            facts = replace(facts, kv_endpoint=transfers.endpoint)
            log.info("KV blocks are served at %s", transfers.endpoint.address)
        await self.turn_ready(facts)
        await asyncio.Event().wait()
