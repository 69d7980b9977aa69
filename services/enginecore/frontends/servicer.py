"""The engine core's gRPC servicers: frontends' streams, and operators' calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

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
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, Agreement, SessionTerms, read_hello
from triptych.rpc.session.lease import SessionLease
from triptych.types.outputs import OutputBatch
from triptych.types.submit import EngineWelcome
from triptych.wire.admin import (
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
from triptych_services.enginecore.loop import EngineLoop, FrontendOutbox

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
        await self._loop.pause(pause_mode_from_proto(request.mode))
        return admin_pb2.PauseResponse()

    async def Resume(
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResumeResponse:
        await self._loop.resume()
        return admin_pb2.ResumeResponse()

    async def Sleep(
        self, request: admin_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SleepResponse:
        level = sleep_level_from_proto(request.level)
        released_bytes = await self._loop.worker_sleep.sleep(level, pause_mode_from_proto(request.mode))
        return admin_pb2.SleepResponse(released_bytes=released_bytes)

    async def Wake(
        self, request: admin_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WakeResponse:
        await self._loop.worker_sleep.wake()
        return admin_pb2.WakeResponse()

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainResponse:
        await self._loop.drain()
        return admin_pb2.DrainResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        raise _not_supported("LoadAdapter")

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        raise _not_supported("UnloadAdapter")

    def _status(self) -> admin_pb2.EngineStatus:
        model = self._loop.welcome.model
        return status_to_proto(self._loop.status(), model.name if model else "")


def _not_supported(method: str) -> FeatureDisabled:
    return FeatureDisabled(f"AdminService.{method}", "this version does not serve it yet")


_NAME_BYTES = 16  # of randomness: a client that knows a session's name can read and end its requests


@dataclass(slots=True, eq=False)
class FrontendSession:
    """One frontend's requests in this engine, over all its streams."""

    number: int
    """Its number in the engine loop."""
    name: str
    """Its name on the wire."""
    frontend_id: str
    boot_id: str
    """Drawn at the frontend's start. Empty: not known."""
    outbox: FrontendOutbox
    lease: SessionLease
    takes_streams: bool = False
    """Whether the frontend takes up streams that began elsewhere, as it has said on the stream that there is."""
    messages_received: int = 0
    """Numbered messages handed to the loop."""
    lost_at: float = 0.0
    """When its last stream was lost, in seconds of the monotonic clock."""

    def is_of_earlier_process(self, frontend_id: str, boot_id: str) -> bool:
        """Return whether this is of the same frontend as of before it was started again."""
        return self.frontend_id == frontend_id and self.boot_id != boot_id


class FrontendSessions:
    """Owned by the servicer."""

    def __init__(self, loop: EngineLoop, resume_ttl_s: float) -> None:
        """`resume_ttl_s`: for how long a session outlives its stream, in seconds."""
        self._loop = loop
        self._resume_ttl_s = resume_ttl_s
        self._name_to_session: dict[str, FrontendSession] = {}

    def __len__(self) -> int:
        """Return how many sessions there are."""
        return len(self._name_to_session)

    def join(
        self,
        frontend_id: str,
        boot_id: str,
        *,
        resume_session: str,
        last_batch_seen: int,
        agreement: Agreement,
    ) -> tuple[FrontendSession, SessionTerms]:
        """Give a new stream its session: the one that it names, if nothing of it is lost, else a new one."""
        resumed = self._resume(resume_session, last_batch_seen)
        session = resumed or self._open(frontend_id, boot_id)
        session.lease.attach()
        received, ttl_s = session.messages_received, self._resume_ttl_s
        return session, SessionTerms(session.name, resumed is not None, received, ttl_s, agreement)

    def lose(self, session: FrontendSession, stream: int) -> None:
        """Note that a stream of this session has ended without a goodbye."""
        if not session.lease.detach(stream):
            return  # another has taken over, or this is known, or the session has ended
        session.lost_at = time.monotonic()
        self._set_takes_streams(session, False)
        session.outbox.stop_reading(ProtocolViolation("the stream has ended without a goodbye"))
        if session.outbox.is_closed or session.outbox.is_overrun or not self._resume_ttl_s:
            self.end(session, "left without a goodbye", is_lost=True)
            return
        later = [other for other in self._name_to_session.values() if other.number > session.number]
        if any(session.is_of_earlier_process(other.frontend_id, other.boot_id) for other in later):
            self.end(session, "was started again", is_lost=True)
            return
        log.warning("frontend %s lost; it may come back within %g s", session.frontend_id, self._resume_ttl_s)

    def abandon(self, name: str) -> None:
        """End the session of this name, which its frontend has given up. It is no error if there is none."""
        session = self._name_to_session.get(name)
        if session is not None:
            self.end(session, "has given up its session")

    def end(self, session: FrontendSession, why: str, *, is_lost: bool = False) -> None:
        """End a session. Safe to repeat.

        Args:
            is_lost: The frontend may have died, so that its clients turn to another one: what is to be kept is. If not,
                what is left of its requests is aborted.
        """
        if self._name_to_session.pop(session.name, None) is not None:
            session.lease.end()
            self._set_takes_streams(session, False)
            if is_lost:
                self._loop.detach_session(session.number, time.monotonic() - session.lost_at)
            else:
                self._loop.close_session(session.number)
            log.info("frontend %s %s", session.frontend_id, why)

    def note_state(self, session: FrontendSession, *, takes_streams: bool) -> None:
        """Take in what a frontend says of itself; the welcome answers it."""
        self._set_takes_streams(session, takes_streams)
        session.outbox.notify(self._loop.welcome)

    def view_of(self, session: FrontendSession, welcome: EngineWelcome) -> EngineWelcome:
        """Return the engine's state as the frontend of a session sees it."""
        others = (other for other in self._name_to_session.values() if other is not session)
        return replace(
            welcome,
            num_other_frontends=sum(other.takes_streams for other in others),
            takes_streams=session.takes_streams,
        )

    def _set_takes_streams(self, session: FrontendSession, takes_streams: bool) -> None:
        """Note whether streams can go on at a frontend, and report it to the others if that is new."""
        if session.takes_streams != takes_streams:
            session.takes_streams = takes_streams
            for other in self._name_to_session.values():
                if other is not session:
                    other.outbox.notify(self._loop.welcome)

    def end_all(self) -> None:
        """End every session because the engine stops."""
        for session in tuple(self._name_to_session.values()):
            self.end(session, "is let go: the engine stops")

    def _open(self, frontend_id: str, boot_id: str) -> FrontendSession:
        """Begin a session.

        Sessions of the same name whose stream is lost end if another process had them: the frontend was started again.
        """
        for other in tuple(self._name_to_session.values()):
            if other.lease.is_waiting and other.is_of_earlier_process(frontend_id, boot_id):
                self.end(other, "was started again", is_lost=True)
        number, outbox = self._loop.open_session()
        name = secrets.token_urlsafe(_NAME_BYTES)
        lease = SessionLease(keep_s=self._resume_ttl_s, on_expired=lambda: self._expire(name))
        session = FrontendSession(number, name, frontend_id, boot_id, outbox, lease)
        self._name_to_session[name] = session
        log.info("frontend %s connected", frontend_id)
        return session

    def _resume(self, name: str, last_batch_seen: int) -> FrontendSession | None:
        """Return the session of this name. None: it is not here, or has lost a later batch, and so has ended."""
        session = self._name_to_session.get(name)
        if session is None:
            return None
        if not session.outbox.can_resume_after(last_batch_seen):
            self.end(session, f"cannot go on behind batch {last_batch_seen}")
            return None
        session.outbox.confirm(last_batch_seen)
        session.outbox.notify(self._loop.welcome)
        log.info("frontend %s is back", session.frontend_id)
        return session

    def _expire(self, name: str) -> None:
        why = f"did not come back within {self._resume_ttl_s:g} s"
        self.end(self._name_to_session[name], why, is_lost=True)
