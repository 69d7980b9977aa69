"""Wiring of the process of a follower, a rank other than 0: it loads its share, and does what the leader relays."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping

from triptych.config import EngineConfig
from triptych.internal.v1 import worker_pb2_grpc
from triptych.rpc.service_main import STOP_GRACE_S
from triptych.types.facts import Phase
from triptych_services.worker.group.follower import GroupFollower
from triptych_services.worker.group.servicer import FollowerServicer
from triptych_services.worker.service.adapters import RankAdapters
from triptych_services.worker.service.runner_app import RunnerApp
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.step_counter import StepCounter

log = logging.getLogger(__name__)

_LEAVE_S = 15.0  # for the leader to finish its steps in flight, and somewhat more


class FollowerApp(RunnerApp):
    """The process of one accelerator among several, which no engine dials."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._follower = GroupFollower(config, on_result=StepCounter(self.metrics).count)
        self._thread = RunnerThread(
            self.loader(self._follower.place),
            on_phase=self.on_phase,
            on_ready=self.on_loaded,
            is_one_of_several=True,
        )
        self._adapters = RankAdapters(config, lambda: self.runner, self._thread)
        servicer = FollowerServicer(config, self.status_publisher)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.server.grpc)

    async def start(self) -> Mapping[str, int]:
        self.start_background("the group", self._follow())
        self.start_thread(self._thread)
        self.start_background("the report of readiness", self._report_readiness())
        return {}

    async def drain(self) -> None:
        """Wait until the leader ends the group: what is in flight is finished by all ranks together."""
        log.info("stopping: waiting for the leader to end the group")
        self.status_publisher.change(phase=Phase.DRAINING, progress=0.0)
        await self.server.set_ready(False)
        await self._follower.leave(_LEAVE_S)
        await self.server.stop(STOP_GRACE_S)
        await self.stop_thread(self._thread)

    async def _follow(self) -> None:
        await self._follower.follow(self._thread, self._adapters)
        if self._follower.has_left.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # as the process that stopped the leader may do as well
        await asyncio.Event().wait()

    async def _report_readiness(self) -> None:
        facts = await self.ready
        self._follower.tell_ready(facts)
        await self.turn_ready(facts)
        await asyncio.Event().wait()
