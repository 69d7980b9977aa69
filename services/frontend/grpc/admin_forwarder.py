"""The operator's gRPC service: calls are forwarded, unread, to the engine that their request names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from services.frontend.engines.client import EngineClient
from services.frontend.engines.router import Router
from triptych.admin.v1 import admin_pb2
from triptych.rpc.status import from_rpc_error

_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
ADMIN_SERVICE = _SERVICE.full_name


def create_admin_forwarder(router: Router) -> grpc.GenericRpcHandler:
    """Return what serves all methods of AdminService. What an engine refuses, it refuses in its words."""
    handlers = {}
    for method in _SERVICE.methods:
        path = f"/{ADMIN_SERVICE}/{method.name}"
        request_type = getattr(admin_pb2, method.input_type.name)
        wrap, forward = (
            (grpc.unary_stream_rpc_method_handler, _forward_stream)
            if method.server_streaming
            else (grpc.unary_unary_rpc_method_handler, _forward)
        )
        handlers[method.name] = wrap(forward(router, path), request_deserializer=request_type.FromString)
    handlers["ListEngines"] = grpc.unary_unary_rpc_method_handler(
        _list_engines(router),
        request_deserializer=admin_pb2.ListEnginesRequest.FromString,
        response_serializer=admin_pb2.ListEnginesResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)


def _list_engines(router: Router) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> admin_pb2.ListEnginesResponse:
        return admin_pb2.ListEnginesResponse(engines=map(_to_info, router.engines))

    return handle


def _to_info(engine: EngineClient) -> admin_pb2.EngineInfo:
    model = engine.welcome.model if engine.welcome is not None else None
    return admin_pb2.EngineInfo(
        engine_id=engine.name,
        address=engine.address,
        ready=engine.is_ready,
        why_not_ready="" if engine.is_ready else engine.why_not_ready,
        model=model.name if model is not None else "",
    )


def _forward(router: Router, path: str) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> bytes:
        call = router.by_id(request.engine_id).channel.unary_unary(path)
        try:
            return await call(request.SerializeToString(), timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    return handle


def _forward_stream(router: Router, path: str) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        stub = router.by_id(request.engine_id).channel.unary_stream(path)
        call = stub(request.SerializeToString(), timeout=context.time_remaining())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    return handle
