"""A complete servicer of health.v1: grpc's own for asyncio has Check and Watch, but not List."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION_SERVICE = "triptych.v1.GenerationService"
"""The name in the health service that says whether a frontend takes requests."""


class Health(health.aio.HealthServicer):
    """The state of each service by name; `""` is the process itself, alive from the start."""

    async def set(self, service: str, status: int) -> None:
        """Set a status and notify watchers. Checks see it at once; one watcher that does not read delays the others."""
        self._server_status[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status)
            for service, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)
