"""One engine, seen from the frontend: the session with it, over streams that are dialed again and resumed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from triptych.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    GenerationLost,
    NotKept,
    ProtocolViolation,
    TriptychError,
)
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc
from triptych.observe.logging import with_fields
from triptych.rpc.channel import RenewedChannel
from triptych.rpc.session.dialer import FIRST_REDIAL_S, Dialer
from triptych.rpc.session.handshake import (
    BEATS,
    ENGINE_PROTOCOL,
    HANDOVER,
    SessionTerms,
    check_resumed,
    greet,
    session_hello,
)
from triptych.rpc.status import from_rpc_error
from triptych.rpc.tls import ClientTls
from triptych.types.submit import AttachRequest, EngineWelcome, SubmitRequest
from triptych.wire.engine_core import outputs_from_proto, welcome_from_proto
from triptych_services.frontend.engines.heartbeat import Liveness
from triptych_services.frontend.engines.session import Attachment, EngineLoss, EngineSession, OutputSink
from triptych_services.frontend.routing.load import EngineLoad
from triptych_services.frontend.routing.prefix_index import PrefixIndex, RoutedPrompt

log = logging.getLogger(__name__)

_READER_END_S = 1.0
_SAME_NEWS_S = 60.0  # before redials that fail in the same way are logged again
_GOODBYE_S = 1.0
# Errors that a status without our details is read as: gRPC itself, or the network, ended the stream.
_UNTYPED = (EngineUnavailable, GenerationLost, DeadlineExceeded, TriptychError)


class EngineClient:
    """A connection to one engine. Owned by the app, which runs `run` as long as it serves. Bound to one event loop.

    When a stream breaks, its session is resumed on the next one, which delays the requests. They end only when the
    session is given up (docs/wire.md).
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        boot_id: str,
        on_change: Callable[[], None] = lambda: None,
        on_session: Callable[[str], None] = lambda outcome: None,
        tls: ClientTls | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        """
        Args:
            on_change: Called whenever readiness or facts may have changed.
            on_session: Called with `begun`, `resumed` or `lost`; lost is a session with choices in flight.
            tls: None: the engine is dialed in plain text.
            index: The blocks that all engines cache. None: each session has one of its own.
        """
        self.address = address
        self._index = index
        self._connection = RenewedChannel(address, tls)
        self.welcome: EngineWelcome | None = None
        """The engine's state as last reported. It stays after a loss, so that the engine can still be named."""
        self._frontend_id = frontend_id
        self._boot_id = boot_id
        self._on_change = on_change
        self._on_session = on_session
        self._session: EngineSession | None = None
        self._abandoned = ""
        """Name of a session that was given up here and that the engine may still keep. Empty: none."""
        self._takes_streams = False
        self._is_connected = False  # there is a stream, and the engine has welcomed it
        self.dialer: Dialer[_Stream] = Dialer(self._connect, on_failed=self._note_end, on_given_up=self._lose)
        """Knows whether there is a session, and for how long it can be resumed."""
        self._why_lost = "not connected yet"
        self._logged: tuple[grpc.StatusCode | None, float] | None = None
        """Status of the last failed dial that was logged, and when. None: none since the last stream."""
        self.liveness = Liveness()
        self._call: grpc.aio.StreamStreamCall | None = None
        """The stream. None: there is none."""

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel of the stream, on which operators' calls go, too."""
        return self._connection.channel

    @property
    def name(self) -> str:
        """The engine's id once it has sent a welcome, before that its address."""
        return self.welcome.engine_id if self.welcome is not None else self.address

    @property
    def is_connected(self) -> bool:
        """Whether there is a stream, and the engine has welcomed it."""
        return self._is_connected

    @property
    def is_ready(self) -> bool:
        has_session = self._is_connected and self._session is not None
        return has_session and self.welcome is not None and self.welcome.ready

    @property
    def why_not_ready(self) -> str:
        if not self._is_connected or self.welcome is None:
            return self._why_lost
        if self._session is None:
            return "its session was given up"
        return self.welcome.why_not_ready

    @property
    def num_in_flight(self) -> int:
        """Number of choices that were submitted and have not ended."""
        return self._session.num_in_flight if self._session is not None else 0

    def silent_for(self, now: float) -> float:
        """Return the seconds for which a stream on which choices are in flight has brought nothing; 0 without one."""
        return self.liveness.silent_for(now) if self.num_in_flight else 0.0

    def due_at(self, *, after_s: float, after_silence_s: float) -> float:
        """Return when a look at it is due, with choices in flight: by `is_lost`, or by its silence."""
        if self._is_connected:
            return self.liveness.due_at(after_silence_s)
        return self.liveness.lost_at + after_s

    def send_heartbeat(self, now: float) -> None:
        """Ask for a sign of life, unless one has come or was asked for a moment ago."""
        if self._session is not None and self.liveness.take_heartbeat(now):
            self._session.outbox.send_heartbeat()

    def is_lost(self, now: float, *, after_s: float) -> bool:
        """Return whether choices are in flight on a stream that broke and is not resumed.

        Args:
            after_s: Time in seconds that it has for that, if a process listens at the address.
        """
        if self._is_connected or not self.dialer.has_session or not self.num_in_flight:
            return False
        return self.liveness.is_refused or now - self.liveness.lost_at >= after_s

    def give_up(self, why: str) -> None:
        """End the session, which is never resumed, and its stream if there is one."""
        self.dialer.give_up(why if self._is_connected else f"{self._why_lost}; {why}")
        if self._call is not None:
            self._call.cancel()

    @property
    def load(self) -> EngineLoad:
        """The load and the cache of the engine, as far as they are known."""
        return self._session.load if self._session is not None else EngineLoad()

    def refuses(self, priority: int, tenant: str) -> float | None:
        """Return what `QueueView.refuses` says; None if there is no session."""
        return self._session.queue.refuses(priority, tenant) if self._session is not None else None

    def submit(
        self,
        create: Callable[[Sequence[int]], SubmitRequest],
        sinks: Sequence[OutputSink],
        prompt: RoutedPrompt | None = None,
    ) -> Sequence[int]:
        """Submit one request with a choice for each of `sinks`; return the choices' numbers.

        Args:
            create: Makes the request, given the numbers.
            prompt: As the router has seen it.

        Raises:
            EngineUnavailable: The engine cannot take requests now.
            InvalidRequest: The request is too large to be sent.
            QueueFull: The engine has stopped reading.
        """
        session = self._session
        if session is None or self.welcome is None or not self.welcome.ready:
            raise EngineUnavailable(f"engine {self.name} is not ready: {self.why_not_ready}")
        if not session.has_numbers(len(sinks)):
            if not session.num_in_flight:
                session.outbox.leave()  # and begin another
            raise EngineUnavailable(f"engine {self.name}: its session has no request numbers left; try again")
        request = create(session.take_numbers(len(sinks)))
        session.outbox.check_free_places(request.num_choices, request.num_bytes)
        if not session.num_in_flight:
            self.liveness.note_asked()
        session.submit(request, sinks, prompt)
        return request.numbers.tolist()

    def attach(self, create: Callable[[int], AttachRequest], num_choices: int) -> Attachment:
        """Ask for a request that began elsewhere.

        Args:
            create: Makes the question, given the number of the first choice here.
            num_choices: As many as the client claims. Nothing is made for each before the engine has answered.

        Raises:
            EngineUnavailable, NotKept: There is no stream to the engine; it keeps no requests.
            QueueFull: The engine has stopped reading.
        """
        session = self._session
        if session is None or not self._is_connected or not session.has_numbers(num_choices):
            raise EngineUnavailable(f"engine {self.name} is not there: {self.why_not_ready}")
        if not session.keeps_requests or not session.hands_over:
            raise NotKept(f"engine {self.name} keeps no streams")
        first = session.take_numbers_to_attach(num_choices).start
        request = create(first)
        session.outbox.check_free_places(1, request.num_bytes)
        return session.attach(request)

    def detach(self, numbers: Sequence[int], sink_of: Mapping[int, OutputSink]) -> None:
        """Let choices of one request go on at the engine without a reader, if it may be kept, and hear no more of them.

        Args:
            sink_of: Number -> its sink. A choice that has another one is left alone.
        """
        if self._session is not None:
            self._session.detach(numbers, sink_of)

    def say_takes_streams(self, takes_streams: bool) -> None:
        """Send the engine, now and in each session to come, whether streams that began elsewhere can go on here."""
        self._takes_streams = takes_streams
        if self._session is not None:
            self._session.outbox.say_takes_streams(takes_streams)

    @property
    def knows_state(self) -> bool:
        """Whether the engine has taken in what was said last. True if it cannot now."""
        welcome, session = self.welcome, self._session
        if welcome is None or session is None or not session.hands_over or not self._is_connected:
            return True
        return welcome.takes_streams == self._takes_streams

    @property
    def num_other_frontends(self) -> int:
        """Number of other frontends that take up streams of this engine; 0 while this is not known."""
        return self.welcome.num_other_frontends if self.welcome is not None and self._is_connected else 0

    def stop(self, number: int, sink: OutputSink) -> None:
        """End one choice early. Its sink is still called with the end that the engine reports."""
        if self._session is not None:
            self._session.stop(number, sink)

    def abort(self, number: int, sink: OutputSink) -> None:
        """End one choice and drop its later outputs. Safe at any time."""
        if self._session is not None:
            self._session.abort(number, sink)

    async def run(self) -> None:
        """Keep a stream to the engine until cancelled."""
        try:
            while True:
                stream = await self.dialer.dial()
                self._begin(stream)
                self._note_end(await self._serve(stream))
                await asyncio.sleep(FIRST_REDIAL_S)
        finally:
            self._is_connected = False
            self.dialer.give_up("the frontend is stopping")
            await self.channel.close(None)

    async def _connect(self) -> _Stream:
        """Open a stream that resumes the session, or begins a new one."""
        await self._connection.renew()
        session, abandoned = self._session, self._abandoned
        name, last_batch_seen = ("", 0) if session is None else (session.name, session.last_batch_seen)
        hello = engine_core_pb2.ConnectHello(
            session=session_hello(ENGINE_PROTOCOL, name, last_batch_seen),
            frontend_id=self._frontend_id,
            boot_id=self._boot_id,
            abandoned_session=abandoned,
        )
        call = engine_core_pb2_grpc.EngineCoreServiceStub(self.channel).Connect()
        try:
            welcome = await greet(call, engine_core_pb2.ConnectRequest(hello=hello))
            terms = SessionTerms.from_proto(welcome.session, ENGINE_PROTOCOL)
            if terms.is_resumed:
                check_resumed(terms, name, session.outbox.sent if session is not None else None)
                assert session is not None, "no other is resumed"
                session.outbox.confirm(terms.last_received)
            else:
                session = EngineSession(
                    terms.name,
                    keeps_requests=welcome.limits.keeps_requests,
                    hands_over=terms.agreement.has(HANDOVER),
                    index=self._index,
                )
                session.outbox.say_takes_streams(self._takes_streams)
            if terms.is_resumed and session is not self._session:
                raise EngineUnavailable("the session was given up while it was resumed")
        except BaseException:
            call.cancel()
            raise
        before, self.welcome = self.welcome, welcome_from_proto(welcome)
        self.liveness.note_process(before, self.welcome)
        session.load.note_hash(self.welcome.prefix_hash)
        return _Stream(call, session, terms, abandoned)

    def _begin(self, stream: _Stream) -> None:
        """Take a stream that the engine has welcomed into use."""
        session = self._session = stream.session
        self._is_connected, self._logged = True, None
        self._on_session("resumed" if stream.is_resumed else "begun")
        self._call = stream.call
        self.liveness.begin(has_heartbeats=stream.terms.agreement.has(BEATS))
        if stream.abandoned == self._abandoned:  # else the engine has not heard of the one given up last
            self._abandoned = ""
        fields = with_fields(resumed=stream.is_resumed, in_flight=session.num_in_flight)
        log.info("engine %s at %s connected", self.name, self.address, extra=fields)
        self._on_change()

    async def _serve(self, stream: _Stream) -> BaseException | None:
        """Use a stream until its end. Return what broke it, or None if the engine closed it."""
        session, call = stream.session, stream.call
        tasks = (
            asyncio.create_task(self._read(call, session), name=f"read-{self.address}"),
            asyncio.create_task(
                session.outbox.write_to(call, tells_state=session.hands_over), name=f"write-{self.address}"
            ),
        )
        try:
            await self._wait_for_end(tasks, session)
            # Both end when the stream does, the writer sometimes first, but only the reader learns why.
            await asyncio.wait(tasks[:1], timeout=_READER_END_S)
            ended = tasks[0] if tasks[0].done() else tasks[1]
            return asyncio.CancelledError() if ended.cancelled() else ended.exception()
        finally:
            self._call = None
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_end(self, tasks: tuple[asyncio.Task[None], ...], session: EngineSession) -> None:
        """Wait until one of them is done; when this frontend stops, until the goodbye has arrived."""
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            session.outbox.leave()
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
            raise

    async def _read(self, call: grpc.aio.StreamStreamCall, session: EngineSession) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self.liveness.note_message()
            match message.WhichOneof("message"):
                case "outputs":
                    batch = outputs_from_proto(message.outputs)
                    if session.take_in(batch, message.outputs.messages_received):
                        self.dialer.note_progress()
                case "welcome":
                    before, self.welcome = self.welcome, welcome_from_proto(message.welcome)
                    session.load.note_hash(self.welcome.prefix_hash)
                    if self.welcome != before:  # else it answers a heartbeat
                        self._on_change()
                case other:
                    raise ProtocolViolation(f"expected outputs or a welcome, got {other}")

    def _note_end(self, error: BaseException | None) -> None:
        """Note that a stream, or the attempt at one, has ended. Its session is resumed, or given up."""
        why = self._explain(error)
        if self._is_connected:
            log.warning("engine %s at %s lost: %s", self.name, self.address, why)
        elif self._is_news(error):
            log.info("engine %s at %s not reached: %s", self.name, self.address, why)
        self._is_connected, self._why_lost = False, why
        self.liveness.end(error, self.welcome)
        is_torn = self._session is not None and self._session.is_torn
        is_over = error is None or _is_refusal(error) or is_torn
        self.dialer.note_broken(why, is_futile=not _is_of_the_network(error), is_over=is_over)
        self._on_change()

    def _is_news(self, error: BaseException | None) -> bool:
        """Return whether a dial has failed otherwise than those before it, or a while after one that was logged.

        gRPC words one and the same failure in many ways, so that statuses are compared.
        """
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        now, logged = time.monotonic(), self._logged
        if logged is not None and logged[0] == code and now - logged[1] < _SAME_NEWS_S:
            return False
        self._logged = code, now
        return True

    def _lose(self, why: str) -> None:
        """End every request of a session that is given up."""
        session, self._session = self._session, None
        self._on_change()
        if session is not None and session.num_in_flight:
            self._on_session("lost")
        if session is not None:
            self._abandoned = session.name
            session.end(EngineLoss(f"engine {self.name} was lost ({why})", is_death=self.liveness.has_died))

    def _explain(self, error: BaseException | None) -> str:
        match error:
            case None:
                return "the engine closed the stream"
            case asyncio.CancelledError():  # grpc raises it when a call is cancelled on this side
                return "the stream was cancelled"
            case grpc.aio.AioRpcError():
                return from_rpc_error(error).message
            case TriptychError():
                return error.message
        # A message that trips a bug costs this session, not the frontend and its other engines.
        log.error("engine %s at %s: its stream failed by a bug", self.name, self.address, exc_info=error)
        return f"internal error: {error!r}"


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """A stream that the engine has welcomed."""

    call: grpc.aio.StreamStreamCall
    session: EngineSession
    terms: SessionTerms
    abandoned: str
    """Name of the given-up session that its hello has named. Empty: none."""

    @property
    def is_resumed(self) -> bool:
        return self.terms.is_resumed

    @property
    def resume_ttl_s(self) -> float:
        return self.terms.resume_ttl_s


def _is_of_the_network(error: BaseException | None) -> bool:
    """Return whether the network broke the stream, not a message, so that the next stream may fare better."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return isinstance(error, asyncio.CancelledError | EngineUnavailable)


def _is_refusal(error: BaseException) -> bool:
    """Return whether the engine has ended the session by an error of its own."""
    return isinstance(error, grpc.aio.AioRpcError) and type(from_rpc_error(error)) not in _UNTYPED
