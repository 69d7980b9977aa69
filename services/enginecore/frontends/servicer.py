"""The engine core's gRPC servicers: frontends' streams, and operators' calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from triptych import failpoints
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.errors import (
    FeatureDisabled,
    InvalidRequest,
    ProtocolViolation,
)
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc, session_pb2
from triptych.observe.logging import set_level
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, read_hello
from triptych.types.adapters import AdapterFacts
from triptych.types.outputs import OutputBatch
from triptych.wire.admin import (
    adapter_to_proto,
    log_level_from_proto,
    pause_mode_from_proto,
    sleep_level_from_proto,
    status_to_proto,
)
from triptych.wire.columns import u32_from_bytes
from triptych.wire.engine_core import (
    attach_from_proto,
    outputs_to_proto,
    submit_from_proto,
    welcome_to_proto,
)
from triptych_services.enginecore.frontends.sessions import FrontendSession, FrontendSessions
from triptych_services.enginecore.loop import EngineLoop

log = logging.getLogger(__name__)

SERVICE = engine_core_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_ABORTS_TOGETHER = 256  # taken in by the loop at once
_DEFAULT_INTERVAL_MS = 1000
_MIN_INTERVAL_MS = 100


class EngineCoreServicer(engine_core_pb2_grpc.EngineCoreServiceServicer):
    """Serves `triptych.internal.v1.EngineCoreService`."""

    def __init__(self, loop: EngineLoop, *, resume_ttl_s: float) -> None:
        """`resume_ttl_s`: for how long a frontend's session outlives its stream, in seconds."""
        self._loop = loop
        self.sessions = FrontendSessions(loop, resume_ttl_s)

    def close(self) -> None:
        """End every session, each stream behind what waits for it. Call it last."""
        self.sessions.end_all()

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_core_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[engine_core_pb2.ConnectResponse]:
        hello, agreement = await read_hello(request_iterator, ENGINE_PROTOCOL)
        self.sessions.abandon(hello.abandoned_session)
        session, terms = self.sessions.join(
            hello.frontend_id,
            hello.boot_id,
            resume_session=hello.session.resume_session,
            last_batch_seen=hello.session.last_received,
            agreement=agreement,
        )
        stream, messages = session.lease.stream, session.outbox.messages()
        reader = asyncio.create_task(
            self._read(request_iterator, session, stream), name=f"read-{session.frontend_id}"
        )
        session_welcome: session_pb2.SessionWelcome | None = terms.to_proto()
        if failpoints.ARMED:
            failpoints.reach("enginecore.before_welcome")
        try:
            async for message in messages:
                if isinstance(message, OutputBatch):
                    outputs = outputs_to_proto(message, session.messages_received)
                    if failpoints.ARMED:
                        failpoints.reach("enginecore.before_outputs")
                    yield engine_core_pb2.ConnectResponse(outputs=outputs)
                    if failpoints.ARMED:
                        failpoints.reach("enginecore.after_outputs")
                    continue
                welcome = welcome_to_proto(self.sessions.view_of(session, message))
                if session_welcome is not None:  # the first message of all
                    welcome.session.CopyFrom(session_welcome)
                    session_welcome = None
                yield engine_core_pb2.ConnectResponse(welcome=welcome)
        finally:
            reader.cancel()
            self.sessions.lose(session, stream)

    async def _read(
        self,
        requests: AsyncIterator[engine_core_pb2.ConnectRequest],
        session: FrontendSession,
        stream: int,
    ) -> None:
        """Take what comes as long as this is the session's stream. An error in it ends the session.

        To gRPC a client that vanishes and one that closes its half of the stream look alike; only a client that stays
        away on purpose says goodbye.
        """
        try:
            async for request in requests:
                if session.lease.stream != stream:  # what comes late here comes once more on the next stream
                    return
                self._take(request, session)
                await self._loop.wait_until_below_limit()
        except Exception as error:
            session.outbox.close(error)
            self.sessions.end(session, f"ended by an error: {error}")
        else:
            self.sessions.lose(session, stream)

    def _take(self, request: engine_core_pb2.ConnectRequest, session: FrontendSession) -> None:
        match request.WhichOneof("message"):
            case "submit":
                for message in request.submit.requests:
                    try:
                        submit = submit_from_proto(message)
                    except (FeatureDisabled, InvalidRequest) as error:  # anything else is a broken stream
                        self._loop.refuse(session.number, u32_from_bytes(message.numbers).tolist(), error)
                    else:
                        self._loop.submit(session.number, submit)
                if failpoints.ARMED:
                    failpoints.reach("enginecore.after_submit")
                session.messages_received += 1
            case "abort":
                numbers = u32_from_bytes(request.abort).tolist()
                for first in range(0, len(numbers), _ABORTS_TOGETHER):
                    self._loop.abort(session.number, numbers[first : first + _ABORTS_TOGETHER])
                if failpoints.ARMED:
                    failpoints.reach("enginecore.after_abort")
                session.messages_received += 1
            case "stop":
                self._loop.stop(session.number, u32_from_bytes(request.stop).tolist())
                session.messages_received += 1
            case "detach":
                self._loop.detach(session.number, u32_from_bytes(request.detach).tolist())
                session.messages_received += 1
            case "state":
                self.sessions.note_state(session, takes_streams=request.state.takes_streams)
            case "attach":
                self._loop.attach(session.number, attach_from_proto(request.attach))
                session.messages_received += 1
            case "last_batch_seen":
                session.outbox.confirm(request.last_batch_seen)
            case "beat":
                session.outbox.notify(self._loop.welcome)
            case "goodbye":
                self.sessions.end(session, "left")
            case other:
                raise ProtocolViolation(
                    f"expected a submit, a stop, an abort, an attach, a detach or a goodbye, got {other}"
                )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves `triptych.admin.v1.AdminService`; frontends forward to it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListEnginesResponse:
        welcome = self._loop.welcome
        info = admin_pb2.EngineInfo(
            engine_id=welcome.engine_id,
            ready=welcome.ready,
            why_not_ready=welcome.why_not_ready,
            model=welcome.model.name if welcome.model else "",
        )
        return admin_pb2.ListEnginesResponse(engines=[info])

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(status=self._status())

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetLogLevelResponse:
        set_level(log_level_from_proto(request.log_level))
        return admin_pb2.SetLogLevelResponse()

    async def WatchStatus(
        self, request: admin_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WatchStatusResponse]:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
        if interval_ms < _MIN_INTERVAL_MS:
            raise InvalidRequest("interval_ms", f"{interval_ms} is below the limit {_MIN_INTERVAL_MS}")
        last, unchanged_ms = None, 0
        while True:
            status = self._status()
            if status != last or unchanged_ms >= request.unchanged_interval_ms:
                yield admin_pb2.WatchStatusResponse(status=status)
                last, unchanged_ms = status, 0
            await asyncio.sleep(interval_ms / 1000)
            unchanged_ms += interval_ms

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=self._loop.operator.reset_prefix_cache())

    async def Pause(
        self, request: admin_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.PauseResponse:
        await self._loop.operator.pause(pause_mode_from_proto(request.mode))
        return admin_pb2.PauseResponse()

    async def Resume(
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResumeResponse:
        await self._loop.operator.resume()
        return admin_pb2.ResumeResponse()

    async def Sleep(
        self, request: admin_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SleepResponse:
        level = sleep_level_from_proto(request.level)
        released_bytes = await self._loop.operator.worker_sleep.sleep(
            level, pause_mode_from_proto(request.mode)
        )
        return admin_pb2.SleepResponse(released_bytes=released_bytes)

    async def Wake(
        self, request: admin_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WakeResponse:
        await self._loop.operator.worker_sleep.wake()
        return admin_pb2.WakeResponse()

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainResponse:
        await self._loop.operator.drain()
        return admin_pb2.DrainResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        facts = await self._loop.adapters.load(request.name, request.source)
        return admin_pb2.LoadAdapterResponse(adapter=self._adapter(facts))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        self._loop.adapters.unload(request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=map(self._adapter, self._loop.adapters.facts))

    def _adapter(self, facts: AdapterFacts) -> admin_pb2.Adapter:
        is_resident = self._loop.adapters.is_resident(facts)
        return adapter_to_proto(facts, self._loop.welcome.engine_id, is_resident=is_resident)

    def _status(self) -> admin_pb2.EngineStatus:
        model = self._loop.welcome.model
        return status_to_proto(self._loop.operator.status(), model.name if model else "")
