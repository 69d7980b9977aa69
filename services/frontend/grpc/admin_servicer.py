"""The operator's gRPC door: every call is forwarded to the engine that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from services.frontend.engines.router import Router
from triptych.rpc.status import from_rpc_error
from triptych.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves `triptych.v1.AdminService`. What an engine refuses, it refuses in the engine's words."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        return await self._forward("GetStatus", request, context)

    async def WatchStatus(
        self, request: admin_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WatchStatusResponse]:
        call = self._stub(request).WatchStatus(request, timeout=context.time_remaining())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def Pause(
        self, request: admin_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.PauseResponse:
        return await self._forward("Pause", request, context)

    async def Resume(
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResumeResponse:
        return await self._forward("Resume", request, context)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainResponse:
        return await self._forward("Drain", request, context)

    async def Sleep(
        self, request: admin_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SleepResponse:
        return await self._forward("Sleep", request, context)

    async def Wake(
        self, request: admin_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WakeResponse:
        return await self._forward("Wake", request, context)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return await self._forward("ResetPrefixCache", request, context)

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        return await self._forward("LoadAdapter", request, context)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        return await self._forward("UnloadAdapter", request, context)

    async def _forward(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await getattr(self._stub(request), method)(request, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _stub(self, request: Any) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self._router.by_id(request.engine_id).channel)
