"""The engine core's gRPC doors: frontends' streams, facts, and the operator's counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from services.enginecore.loop import EngineLoop
from services.enginecore.outbox import Outbox
from triptych.errors import (
    EngineUnavailable,
    FeatureDisabled,
    HandshakeMismatch,
    InvalidRequest,
    ProtocolViolation,
)
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc
from triptych.types.outputs import OutputBatch
from triptych.v1 import admin_pb2, admin_pb2_grpc
from triptych.wire.admin import status_to_proto
from triptych.wire.columns import u32_from_bytes
from triptych.wire.engine_core import outputs_to_proto, submit_from_proto, welcome_to_proto
from triptych.wire.worker import PROTOCOL_VERSION, worker_facts_to_proto

log = logging.getLogger(__name__)

SERVICE = engine_core_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_HELLO_TIMEOUT_S = 10.0
_DEFAULT_INTERVAL_MS = 1000
_MIN_INTERVAL_MS = 100


class EngineCoreDoor(engine_core_pb2_grpc.EngineCoreServiceServicer):
    """Serves `triptych.internal.v1.EngineCoreService`."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_core_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[engine_core_pb2.ConnectResponse]:
        frontend_id = await _read_hello(request_iterator)
        session, outbox = self._loop.open_session()
        log.info("frontend %s connected", frontend_id)
        reader = asyncio.create_task(
            self._read(request_iterator, session, outbox), name=f"read-{frontend_id}"
        )
        try:
            async for message in outbox.messages():
                if isinstance(message, OutputBatch):
                    yield engine_core_pb2.ConnectResponse(outputs=outputs_to_proto(message))
                else:
                    yield engine_core_pb2.ConnectResponse(welcome=welcome_to_proto(message))
        finally:
            reader.cancel()
            self._loop.close_session(session)
            log.info("frontend %s left", frontend_id)

    async def GetEngineInfo(
        self, request: engine_core_pb2.GetEngineInfoRequest, context: grpc.aio.ServicerContext
    ) -> engine_core_pb2.GetEngineInfoResponse:
        welcome, facts = self._loop.welcome, self._loop.facts
        if not welcome.ready or facts is None:
            raise EngineUnavailable(f"engine {welcome.engine_id}: {welcome.why_not_ready}")
        return engine_core_pb2.GetEngineInfoResponse(
            engine_id=welcome.engine_id, epoch=welcome.epoch, facts=worker_facts_to_proto(facts)
        )

    async def _read(
        self, requests: AsyncIterator[engine_core_pb2.ConnectRequest], session: int, outbox: Outbox
    ) -> None:
        """Post what comes until the frontend closes its half; what goes wrong ends the session's outputs."""
        try:
            async for request in requests:
                self._take(request, session)
                await self._loop.wait_for_room()
        except Exception as error:
            outbox.close(error)
        else:
            outbox.close()

    def _take(self, request: engine_core_pb2.ConnectRequest, session: int) -> None:
        match request.WhichOneof("message"):
            case "submit":
                for message in request.submit.requests:
                    self._loop.submit(session, submit_from_proto(message))
            case "abort":
                for number in u32_from_bytes(request.abort).tolist():
                    self._loop.abort(session, number)
            case "last_batch_seen":
                pass  # acknowledgements free nothing yet: a lost stream's outputs are not kept
            case "attach":
                raise FeatureDisabled("attach", "a broken stream's requests cannot be taken up yet")
            case other:
                raise ProtocolViolation(f"expected a submit or an abort, got {other}")


class AdminDoor(admin_pb2_grpc.AdminServiceServicer):
    """Serves `triptych.v1.AdminService`; frontends forward to it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(status=self._status())

    async def WatchStatus(
        self, request: admin_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WatchStatusResponse]:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
        if interval_ms < _MIN_INTERVAL_MS:
            raise InvalidRequest("interval_ms", f"{interval_ms} is below the limit {_MIN_INTERVAL_MS}")
        while True:
            yield admin_pb2.WatchStatusResponse(status=self._status())
            await asyncio.sleep(interval_ms / 1000)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=self._loop.reset_prefix_cache())

    async def Pause(
        self, request: admin_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.PauseResponse:
        raise _not_built("Pause")

    async def Resume(
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResumeResponse:
        raise _not_built("Resume")

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainResponse:
        raise _not_built("Drain")

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        raise _not_built("LoadAdapter")

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        raise _not_built("UnloadAdapter")

    def _status(self) -> admin_pb2.EngineStatus:
        model = self._loop.welcome.model
        return status_to_proto(self._loop.status(), model.name if model else "")


async def _read_hello(requests: AsyncIterator[engine_core_pb2.ConnectRequest]) -> str:
    """The frontend's name out of its hello."""
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolViolation(f"no hello within {_HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first message must be a hello")
    hello = first.hello
    if not hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol:
        raise HandshakeMismatch(
            f"protocol: frontend speaks {hello.min_protocol}..{hello.max_protocol}, engine {PROTOCOL_VERSION}"
        )
    return str(hello.frontend_id)


def _not_built(method: str) -> FeatureDisabled:
    return FeatureDisabled(f"AdminService.{method}", "this version does not serve it yet")
