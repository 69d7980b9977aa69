"""Follows the start of a stack: the worker's phase, then the frontend's health."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import credentials_of, open_blocking_channel
from triptych.rpc.health import GENERATION_SERVICE
from triptych.rpc.tls import ClientTls
from triptych.types.facts import Phase

_CALL_TIMEOUT_S = 0.1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """The start-up phase of a stack."""

    phase: str
    """starting, the worker's phase (`triptych.types.facts.Phase`), or connecting once that is ready."""
    fraction: float = 0.0
    """Completed part of the phase, 0..1; 0 if the phase has no measure."""

    def __str__(self) -> str:
        return f"{self.phase} {self.fraction:.0%}" if self.fraction else self.phase


class ReadinessProbe:
    """Asks a frontend and its worker for their state. Synchronous, for threads without an event loop."""

    def __init__(self, frontend_address: str, worker_address: str, tls: ClientTls | None = None) -> None:
        self._frontend = open_blocking_channel(frontend_address, credentials_of(tls))
        self._worker = open_blocking_channel(worker_address, credentials_of(tls))
        self._health = health_pb2_grpc.HealthStub(self._frontend)
        self._info = worker_pb2_grpc.WorkerServiceStub(self._worker)

    def __enter__(self) -> ReadinessProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._frontend.close()
        self._worker.close()

    def is_ready(self) -> bool:
        """Return whether the frontend takes requests. Sleeps for a moment first, so that callers may loop over it."""
        time.sleep(_POLL_S)
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        try:
            response = self._health.Check(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def progress(self) -> Progress:
        """Return the worker's phase; `starting` while it does not answer."""
        try:
            info = self._info.GetInfo(worker_pb2.GetInfoRequest(), timeout=_CALL_TIMEOUT_S).info
        except grpc.RpcError:
            return Progress(Phase.STARTING)
        return Progress("connecting") if info.phase == Phase.READY else Progress(info.phase, info.progress)
