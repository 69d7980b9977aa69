"""A follower's gRPC servicer: it reports its state, and sends engines to the leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc.aio

from triptych.config import EngineConfig
from triptych.errors import FeatureDisabled
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych_services.worker.service.servicer import info_to_proto
from triptych_services.worker.service.status import StatusPublisher


class FollowerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `GetInfo` of `triptych.internal.v1.WorkerService`; the rest is the leader's."""

    def __init__(self, config: EngineConfig, status_publisher: StatusPublisher) -> None:
        self._rank = config.worker.rank
        self._status_publisher = status_publisher

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        self._refuse("Execute")
        yield worker_pb2.ExecuteResponse()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=info_to_proto(self._status_publisher.state))

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Any) -> worker_pb2.SleepResponse:
        self._refuse("Sleep")

    async def Wake(self, request: worker_pb2.WakeRequest, context: Any) -> worker_pb2.WakeResponse:
        self._refuse("Wake")

    def _refuse(self, method: str) -> NoReturn:
        raise FeatureDisabled(
            method,
            f"this worker is rank {self._rank} of its group; set engine.worker_address to that of rank 0",
        )
