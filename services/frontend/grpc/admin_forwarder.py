"""The operator's gRPC service: calls are forwarded, unread, to the engine that their request names.

Those about this frontend and its requests are answered here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import chain
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.errors import InvalidRequest
from triptych.observe.logging import set_level
from triptych.rpc.status import from_rpc_error
from triptych.wire.admin import log_level_from_proto
from triptych_services.frontend.engines.call_all import call_all_engines
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.long_calls import read_small
from triptych_services.frontend.grpc.pages import read_page_size
from triptych_services.frontend.requests.raw import MAX_ABORTS
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.registry import AliveRequest

_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
ADMIN_SERVICE = _SERVICE.full_name
_OWN_METHODS = (
    *("ListEngines", "ListRequests", "AbortRequests", "SetLogLevel"),
    *("LoadAdapter", "UnloadAdapter", "ListAdapters"),
)
_MAX_BYTES = 1 << 16
"""Bytes of a message to a method: names, and the path of an adapter. It is parsed on the event loop."""
_MAX_ABORT_BYTES = 1 << 20  # twice what `MAX_ABORTS` ids take
_SET_LOG_LEVEL = f"/{ADMIN_SERVICE}/SetLogLevel"


def create_admin_forwarder(router: Router, generator: Generator) -> grpc.GenericRpcHandler:
    """Return what serves all methods of AdminService. What an engine refuses, it refuses in its words."""
    handlers = {}
    for method in _SERVICE.methods:
        path = f"/{ADMIN_SERVICE}/{method.name}"
        wrap, forward = (
            (grpc.unary_stream_rpc_method_handler, _forward_stream)
            if method.server_streaming
            else (grpc.unary_unary_rpc_method_handler, _forward)
        )
        handlers[method.name] = wrap(forward(router, path), request_deserializer=_reader_of(method.name))
    own = _OwnCalls(router, generator)
    for name in _OWN_METHODS:
        handlers[name] = _serve(name, getattr(own, name))
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)


class _OwnCalls:
    """Methods that a frontend answers by itself."""

    def __init__(self, router: Router, generator: Generator) -> None:
        self._router = router
        self._generator = generator
        self._siblings = generator.siblings
        if self._siblings is not None:
            self._siblings.answer("list_requests", self._list_requests)
            self._siblings.answer("set_log_level", set_level)

    async def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListEnginesResponse:
        return admin_pb2.ListEnginesResponse(engines=map(_to_info, self._router.engines))

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListRequestsResponse:
        page_size = read_page_size(request.page_size)
        question = request.page_token, page_size + 1
        pages = [self._list_requests(*question)]
        if self._siblings is not None:
            pages += await self._siblings.ask_others("list_requests", *question)
        # A stream that goes on at a sibling is alive at both for a moment.
        found = {each.request_id: each for each in map(admin_pb2.AliveRequest.FromString, chain(*pages))}
        ids = sorted(found)
        return admin_pb2.ListRequestsResponse(
            requests=[found[request_id] for request_id in ids[:page_size]],
            next_page_token=ids[page_size - 1] if len(ids) > page_size else "",
        )

    def _list_requests(self, page_token: str, num_wanted: int) -> list[bytes]:
        """Return the first requests of this process behind an id, each as its message.

        A page begins after the id that its token is: requests come and go between two pages.
        """
        behind = [alive for alive in self._generator.alive if alive.outputs.request_id > page_token]
        behind.sort(key=lambda alive: alive.outputs.request_id)
        return [_to_request(alive).SerializeToString() for alive in behind[:num_wanted]]

    async def AbortRequests(
        self, request: admin_pb2.AbortRequestsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AbortRequestsResponse:
        num_ids = len(request.request_ids)
        if not 1 <= num_ids <= MAX_ABORTS:
            raise InvalidRequest("request_ids", f"{num_ids} ids are not within the limits 1..{MAX_ABORTS}")
        aborted = await self._generator.abort(request.request_ids, of_any_tenant=True)
        return admin_pb2.AbortRequestsResponse(aborted_request_ids=aborted)

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: grpc.aio.ServicerContext
    ) -> Any:
        if request.engine_id:
            return await _forward(self._router, _SET_LOG_LEVEL)(request, context)
        level = log_level_from_proto(request.log_level)
        set_level(level)
        if self._siblings is not None:
            await self._siblings.ask_others("set_log_level", level)
        return admin_pb2.SetLogLevelResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        self._router.adapters.check(request.name)
        answers = await self._call_engines(request, context, "LoadAdapter")
        return admin_pb2.LoadAdapterResponse(adapter=_merge(answer.adapter for answer in answers)[0])

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        await self._call_engines(request, context, "UnloadAdapter")
        return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListAdaptersResponse:
        answers = await self._call_engines(request, context, "ListAdapters")
        adapters = [adapter for answer in answers for adapter in answer.adapters]
        return admin_pb2.ListAdaptersResponse(adapters=_merge(adapters))

    async def _call_engines(self, request: Any, context: grpc.aio.ServicerContext, method: str) -> list[Any]:
        """Call a method of the engine that a request names, or of all."""
        router, timeout_s = self._router, context.time_remaining()
        engines = [router.by_id(request.engine_id)] if request.engine_id else router.engines

        async def call(engine: EngineClient) -> Any:
            stub = admin_pb2_grpc.AdminServiceStub(engine.channel)
            try:
                return await getattr(stub, method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

        return await call_all_engines(engines, call)


def _merge(adapters: Iterable[admin_pb2.Adapter]) -> list[admin_pb2.Adapter]:
    """Return adapters by name, those of equal name, digest and source once, with all engines that have them."""
    merged: dict[tuple[str, str, str], admin_pb2.Adapter] = {}
    for adapter in adapters:
        key = adapter.name, adapter.digest, adapter.source
        if key in merged:
            merged[key].engine_ids.extend(adapter.engine_ids)
            merged[key].resident_engine_ids.extend(adapter.resident_engine_ids)
        else:
            merged[key] = adapter
    return [merged[key] for key in sorted(merged)]


def _serve(name: str, handler: Any) -> grpc.RpcMethodHandler:
    """Serve one method here. A handler may also return a response as an engine has encoded it."""
    return grpc.unary_unary_rpc_method_handler(
        handler,
        request_deserializer=_reader_of(name),
        response_serializer=_encode,
    )


def _reader_of(name: str) -> Callable[[bytes], Any]:
    """Return what reads the requests of a method."""
    request_type = getattr(admin_pb2, _SERVICE.methods_by_name[name].input_type.name)
    limit = _MAX_ABORT_BYTES if name == "AbortRequests" else _MAX_BYTES
    return functools.partial(read_small, name, limit, request_type.FromString)


def _encode(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _to_info(engine: EngineClient) -> admin_pb2.EngineInfo:
    model = engine.welcome.model if engine.welcome is not None else None
    return admin_pb2.EngineInfo(
        engine_id=engine.name,
        address=engine.address,
        ready=engine.is_ready,
        why_not_ready="" if engine.is_ready else engine.why_not_ready,
        model=model.name if model is not None else "",
        why_no_affinity=engine.load.why_no_affinity,
    )


def _to_request(alive: AliveRequest) -> admin_pb2.AliveRequest:
    return admin_pb2.AliveRequest(
        request_id=alive.outputs.request_id,
        tenant=alive.raw.head.tenant,
        model=alive.raw.model,
        priority=alive.raw.head.priority,
        age_ms=round((time.monotonic() - alive.arrived) * 1000),
        num_choices=len(alive.outputs.choices),
        num_output_tokens=alive.outputs.num_tokens,
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
