"""One engine as this frontend sees it: a session with it, over one stream that is redialled and resumed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
import grpc.aio

from services.frontend.engines.session import EngineSession, OutputSink
from triptych.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    GenerationLost,
    HandshakeMismatch,
    ProtocolViolation,
    TriptychError,
)
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc
from triptych.observe.logging import with_fields
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.status import from_rpc_error
from triptych.types.submit import EngineWelcome, SubmitRequest
from triptych.wire.engine_core import outputs_from_proto, terms_from_proto, welcome_from_proto
from triptych.wire.worker import PROTOCOL_VERSION

log = logging.getLogger(__name__)

FIRST_REDIAL_S = 0.05
MAX_REDIAL_S = 1.0
MAX_FUTILE_STREAMS = 3
_WELCOME_TIMEOUT_S = 10.0
_READER_END_S = 1.0
_GOODBYE_S = 1.0
# What a status that no door of ours has sent is taken for: gRPC itself, or the network, ended the stream.
_UNTYPED = (EngineUnavailable, GenerationLost, DeadlineExceeded, TriptychError)


class EngineClient:
    """Owned by the app, which runs `run` for as long as it serves. Bound to one event loop.

    A stream that breaks is redialled and its session resumed: to the requests, a delay. They end by the loss
    only when the engine has ended the session, or has not answered within the session's time to live.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        boot_id: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called whenever readiness or facts may have changed."""
        self.address = address
        self.channel: grpc.aio.Channel = open_channel(address, limit_bytes=INTERNAL_MESSAGE_BYTES)
        self.welcome: EngineWelcome | None = None
        """The last one; stays after a loss, so that the engine can still be named."""
        self._frontend_id = frontend_id
        self._boot_id = boot_id
        self._on_change = on_change
        self._session: EngineSession | None = None
        self._abandoned = ""
        """Name of a session that was given up here and may still be kept there."""
        self._is_connected = False  # a stream stands and has been welcomed
        self._give_up: asyncio.TimerHandle | None = None  # runs while a session waits for a stream
        self._why_lost = "not connected yet"

    @property
    def name(self) -> str:
        """Its engine id, once it has told; its address before."""
        return self.welcome.engine_id if self.welcome is not None else self.address

    @property
    def is_ready(self) -> bool:
        return self._is_connected and self.welcome is not None and self.welcome.ready

    @property
    def why_not_ready(self) -> str:
        if not self._is_connected or self.welcome is None:
            return self._why_lost
        return self.welcome.why_not_ready

    @property
    def num_in_flight(self) -> int:
        """Choices submitted and not ended."""
        return self._session.num_in_flight if self._session is not None else 0

    def refuses(self, priority: int, tenant: str) -> float | None:
        """See `QueueView.refuses`."""
        return self._session.queue.refuses(priority, tenant) if self._session is not None else None

    def submit(
        self, create: Callable[[Sequence[int]], SubmitRequest], sinks: Sequence[OutputSink]
    ) -> Sequence[int]:
        """Hand over one request with a choice for each of `sinks`; return the choices' numbers.

        Args:
            create: Makes the request, given the numbers.

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
        session.submit(request, sinks)
        return request.numbers.tolist()

    def stop(self, number: int, sink: OutputSink) -> None:
        """End this request early; its sink still learns from the engine how it ended."""
        if self._session is not None:
            self._session.stop(number, sink)

    def abort(self, number: int, sink: OutputSink) -> None:
        """Nobody waits for this request any more; its later outputs are dropped. Safe at any time."""
        if self._session is not None:
            self._session.abort(number, sink)

    async def run(self) -> None:
        """Keep a stream to the engine until cancelled; redial after 50 ms, doubling to 1 s."""
        delay_s = FIRST_REDIAL_S
        try:
            while True:
                error = await self._run_stream()
                if self._is_connected:  # it was welcomed: this is a new loss
                    delay_s = FIRST_REDIAL_S
                self._note_end(error)
                await asyncio.sleep(delay_s)
                delay_s = min(MAX_REDIAL_S, 2 * delay_s)
        finally:
            self._is_connected = False
            self._lose("the frontend is stopping")
            await self.channel.close(None)

    async def _run_stream(self) -> BaseException | None:
        """One stream, from hello to its end; returns what broke it, or None if the engine closed it."""
        call = engine_core_pb2_grpc.EngineCoreServiceStub(self.channel).Connect()
        tasks: tuple[asyncio.Task[None], ...] = ()
        try:
            session = await self._shake_hands(call)
            tasks = (
                asyncio.create_task(self._read(call, session), name=f"read-{self.address}"),
                asyncio.create_task(session.outbox.write_to(call), name=f"write-{self.address}"),
            )
            await self._wait_for_end(tasks, session)
            # Both end when the stream does, the writer sometimes first, but only the reader is told why.
            await asyncio.wait(tasks[:1], timeout=_READER_END_S)
            ended = tasks[0] if tasks[0].done() else tasks[1]
            return asyncio.CancelledError() if ended.cancelled() else ended.exception()
        except Exception as error:
            return error
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _shake_hands(self, call: grpc.aio.StreamStreamCall) -> EngineSession:
        """Hello and welcome; returns the session that goes on, or begins."""
        asked = self._session
        hello = engine_core_pb2.ConnectHello(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            frontend_id=self._frontend_id,
            boot_id=self._boot_id,
            resume_session=asked.name if asked is not None else "",
            last_batch_seen=asked.last_batch_seen if asked is not None else 0,
            abandoned_session=self._abandoned,
        )
        async with asyncio.timeout(_WELCOME_TIMEOUT_S):
            with suppress(asyncio.InvalidStateError):  # it has ended already: the read tells why
                await call.write(engine_core_pb2.ConnectRequest(hello=hello))
            message = await call.read()
        if message is grpc.aio.EOF:
            raise EngineUnavailable("the engine closed the stream without a welcome")
        self._greet(message)
        terms = terms_from_proto(message.welcome.session)
        if terms.is_resumed:
            session = self._session
            if session is None or session.name != terms.name:
                raise ProtocolViolation(f"the engine resumes session {terms.name!r}, which is not this one")
            session.outbox.confirm(terms.messages_received)
        else:
            self._lose("it has not kept the session: it was started again, or was away for too long")
            session = EngineSession(terms)
        self._cancel_give_up()
        self._session, self._is_connected = session, True
        if hello.abandoned_session == self._abandoned:  # else one more was given up during this handshake
            self._abandoned = ""
        fields = with_fields(resumed=terms.is_resumed, in_flight=session.num_in_flight)
        log.info("engine %s at %s connected", self.name, self.address, extra=fields)
        self._on_change()
        return session

    async def _wait_for_end(self, tasks: tuple[asyncio.Task[None], ...], session: EngineSession) -> None:
        """Until one of them is done; if this frontend is stopping, until the engine has heard goodbye."""
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            session.outbox.leave()
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
            raise

    async def _read(self, call: grpc.aio.StreamStreamCall, session: EngineSession) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "outputs":
                batch = outputs_from_proto(message.outputs)
                session.take_in(batch, message.outputs.messages_received)
            else:
                self._greet(message)
                self._on_change()

    def _greet(self, message: engine_core_pb2.ConnectResponse) -> None:
        kind, protocol = message.WhichOneof("message"), message.welcome.protocol
        if kind != "welcome":
            raise ProtocolViolation(f"expected a welcome, got {kind}")
        if protocol != PROTOCOL_VERSION:
            raise HandshakeMismatch(f"protocol: engine speaks {protocol}, frontend {PROTOCOL_VERSION}")
        self.welcome = welcome_from_proto(message.welcome)

    def _note_end(self, error: BaseException | None) -> None:
        """A stream, or the attempt at one, has ended: hope to resume its session, or give it up."""
        why = self._explain(error)
        if self._is_connected:
            log.warning("engine %s at %s lost: %s", self.name, self.address, why)
        elif why != self._why_lost:  # a redial that fails as the one before is no news
            log.info("engine %s at %s not reached: %s", self.name, self.address, why)
        self._is_connected, self._why_lost = False, why
        if (session := self._session) is not None:
            if not _is_of_the_network(error):
                session.num_futile_streams += 1
            if error is None or _is_refusal(error) or not self._can_resume(session):
                self._lose(why)
            elif self._give_up is None:
                why = f"{why}; not back within {session.resume_ttl_s:g} s"
                loop = asyncio.get_running_loop()
                self._give_up = loop.call_later(session.resume_ttl_s, self._lose, why)
        self._on_change()

    @staticmethod
    def _can_resume(session: EngineSession) -> bool:
        is_futile = session.num_futile_streams > MAX_FUTILE_STREAMS
        return session.resume_ttl_s > 0 and not session.is_torn and not is_futile

    def _lose(self, why: str) -> None:
        """End the session, and every request of it."""
        self._cancel_give_up()
        session, self._session = self._session, None
        if session is not None:
            self._abandoned = session.name
            session.end(f"engine {self.name} was lost ({why})")

    def _cancel_give_up(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def _explain(self, error: BaseException | None) -> str:
        match error:
            case None:
                return "the engine closed the stream"
            case asyncio.CancelledError():  # how grpc tells of a call that was cancelled on this side
                return "the stream was cancelled"
            case TimeoutError():
                return f"no welcome within {_WELCOME_TIMEOUT_S:g} s"
            case grpc.aio.AioRpcError():
                return from_rpc_error(error).message
            case TriptychError():
                return error.message
        # A message that trips a bug costs this session, not the frontend and its other engines.
        log.error("engine %s at %s: its stream failed by a bug", self.name, self.address, exc_info=error)
        return f"internal error: {error!r}"


def _is_of_the_network(error: BaseException | None) -> bool:
    """The stream broke through nothing that was said on it, so the next one has the same chance."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return isinstance(error, TimeoutError | asyncio.CancelledError | EngineUnavailable)


def _is_refusal(error: BaseException) -> bool:
    """The engine itself has ended the session, by one of its own errors."""
    return isinstance(error, grpc.aio.AioRpcError) and type(from_rpc_error(error)) not in _UNTYPED
