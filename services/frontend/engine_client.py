"""One engine as this frontend sees it: one stream, redialled, its outputs dispatched to their requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from services.frontend.logprobs import BatchLogprobs
from services.frontend.outbox import Outbox
from triptych.errors import (
    EngineUnavailable,
    FieldViolation,
    HandshakeMismatch,
    ProtocolViolation,
    TriptychError,
)
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.status import error_from_code, from_rpc_error
from triptych.types.outputs import FinishedRequest, OutputBatch, RequestFailure
from triptych.types.submit import EngineWelcome, SubmitRequest
from triptych.wire.engine_core import outputs_from_proto, welcome_from_proto
from triptych.wire.worker import PROTOCOL_VERSION

log = logging.getLogger(__name__)

FIRST_REDIAL_S = 0.05
MAX_REDIAL_S = 1.0
_WELCOME_TIMEOUT_S = 10.0
_READER_END_S = 1.0
_MAX_NUMBER = (1 << 32) - 1


class OutputSink(Protocol):
    """Who takes the outputs of one submitted request. Called on the loop; must neither block nor await."""

    def on_admitted(self) -> None:
        """The engine has it."""

    def on_tokens(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        """New tokens, and the good end if this is it. `first_row` is the first token's row in `logprobs`."""

    def on_error(self, error: Exception) -> None:
        """The bad end. Nothing follows."""

    def on_engine_lost(self, why: str) -> None:
        """The end of the stream to the engine. Nothing follows."""


class EngineClient:
    """Owned by the app, which runs `run` for as long as it serves. Bound to one event loop."""

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
        self._hello = engine_core_pb2.ConnectHello(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            frontend_id=frontend_id,
            boot_id=boot_id,
        )
        self._on_change = on_change
        self._sinks: dict[int, OutputSink] = {}
        self._outbox: Outbox | None = None  # while a stream stands and has been welcomed
        self._call: grpc.aio.StreamStreamCall | None = None
        self._next_number = 1
        self._why_lost = "not connected yet"

    @property
    def name(self) -> str:
        """Its engine id, once it has told; its address before."""
        return self.welcome.engine_id if self.welcome is not None else self.address

    @property
    def is_ready(self) -> bool:
        return self._outbox is not None and self.welcome is not None and self.welcome.ready

    @property
    def why_not_ready(self) -> str:
        if self._outbox is None or self.welcome is None:
            return self._why_lost
        return self.welcome.why_not_ready

    @property
    def num_in_flight(self) -> int:
        """Choices submitted and not ended."""
        return len(self._sinks)

    def take_number(self) -> int:
        """A number for the next submit.

        Raises:
            EngineUnavailable: the engine cannot take requests now.
            QueueFull: it has stopped reading.
        """
        if self._outbox is None or not self.is_ready:
            raise EngineUnavailable(f"engine {self.name} is not ready: {self.why_not_ready}")
        if self._next_number > _MAX_NUMBER:
            self._renew()
            raise EngineUnavailable(f"engine {self.name}: its stream has no request numbers left; try again")
        self._outbox.check_room()
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def submit(self, request: SubmitRequest, sink: OutputSink) -> None:
        """Hand over a request whose number was taken just now, without an await in between."""
        assert self._outbox is not None, "take_number has just found it there"
        self._sinks[request.number] = sink
        self._outbox.submit(request)

    def stop(self, number: int, sink: OutputSink) -> None:
        """End this request early; its sink still learns from the engine how it ended."""
        if self._sinks.get(number) is sink and self._outbox is not None:
            self._outbox.abort(number)

    def abort(self, number: int, sink: OutputSink) -> None:
        """Nobody waits for this request any more; its later outputs are dropped. Safe at any time."""
        if self._sinks.get(number) is sink:  # else it has ended, or the number is of an earlier stream
            del self._sinks[number]
            if self._outbox is not None:
                self._outbox.abort(number)

    def _renew(self) -> None:
        """Start another stream as soon as the last request of this one has ended."""
        if self._call is not None and not self._sinks:
            self._call.cancel()

    async def run(self) -> None:
        """Keep a stream to the engine until cancelled; redial after 50 ms, doubling to 1 s."""
        delay_s = FIRST_REDIAL_S
        try:
            while True:
                why = await self._run_session()
                if self._outbox is not None:  # it was welcomed: this is a new loss
                    delay_s = FIRST_REDIAL_S
                self._report_loss(why)
                self._lose(why)
                await asyncio.sleep(delay_s)
                delay_s = min(MAX_REDIAL_S, 2 * delay_s)
        finally:
            self._lose("the frontend is stopping")
            await self.channel.close(None)

    async def _run_session(self) -> str:
        """One stream, from hello to its end; returns why it ended."""
        call = self._call = engine_core_pb2_grpc.EngineCoreServiceStub(self.channel).Connect()
        outbox = Outbox(self._on_unsendable)
        tasks = (
            asyncio.create_task(self._read(call, outbox), name=f"read-{self.address}"),
            asyncio.create_task(outbox.write_to(call), name=f"write-{self.address}"),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Both end when the stream does, the writer sometimes first, but only the reader is told why.
            await asyncio.wait(tasks[:1], timeout=_READER_END_S)
            return self._explain(tasks[0] if tasks[0].done() else tasks[1])
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _explain(self, task: asyncio.Task[None]) -> str:
        if task.cancelled():  # how grpc tells of a call that was cancelled on this side
            return "the stream was cancelled"
        error = task.exception()
        match error:
            case None:
                return "the engine closed the stream"
            case TimeoutError():
                return f"no welcome within {_WELCOME_TIMEOUT_S:g} s"
            case grpc.aio.AioRpcError():
                return from_rpc_error(error).message
            case TriptychError():
                return error.message
        # A message that trips a bug costs this stream, not the frontend and its other engines.
        log.error("engine %s at %s: its stream failed by a bug", self.name, self.address, exc_info=error)
        return f"internal error: {error!r}"

    async def _read(self, call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
        await call.write(engine_core_pb2.ConnectRequest(hello=self._hello))
        async with asyncio.timeout(_WELCOME_TIMEOUT_S):
            message = await call.read()
        if message is grpc.aio.EOF:
            return
        self._greet(message)
        self._outbox, self._next_number = outbox, 1
        log.info("engine %s at %s connected", self.name, self.address)
        self._on_change()
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "outputs":
                self._dispatch(outputs_from_proto(message.outputs))
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

    def _report_loss(self, why: str) -> None:
        if self._outbox is not None:
            log.warning("engine %s at %s lost: %s", self.name, self.address, why)
        elif why != self._why_lost:  # a redial that fails as the one before is no news
            log.info("engine %s at %s not reached: %s", self.name, self.address, why)

    def _lose(self, why: str) -> None:
        """End every request of the stream."""
        self._outbox, self._why_lost = None, why
        self._on_change()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_engine_lost(f"engine {self.name} was lost ({why})")

    def _dispatch(self, batch: OutputBatch) -> None:
        """Hand each request its share; one dictionary look-up per request."""
        sinks = self._sinks
        for number in batch.admitted.tolist():
            if (sink := sinks.get(number)) is not None:
                sink.on_admitted()
        finishes = {finish.number: finish for finish in batch.finished}
        if len(batch.numbers):
            self._dispatch_tokens(batch, finishes)
        for number, finish in finishes.items():  # those that end without a new token
            if (sink := sinks.pop(number, None)) is not None:
                self._deliver(number, sink, [], None, 0, finish)
        for failure in batch.failures:
            if (sink := sinks.pop(failure.number, None)) is not None:
                sink.on_error(_to_error(failure))

    def _dispatch_tokens(self, batch: OutputBatch, finishes: dict[int, FinishedRequest]) -> None:
        """Also takes out of `finishes` those whose last tokens these are.

        A batch of several steps has a request's tokens in several places.
        """
        token_ids: list[int] = batch.token_ids.tolist()
        numbers: list[int] = batch.numbers.tolist()
        counts: list[int] = batch.token_counts.tolist() or [1] * len(numbers)
        if sum(counts) != len(token_ids):
            raise ProtocolViolation(
                f"token_counts add up to {sum(counts)}, but there are {len(token_ids)} tokens"
            )
        logprobs = BatchLogprobs(batch.logprobs) if batch.logprobs is not None else None
        last_place = {number: place for place, number in enumerate(numbers)} if finishes else {}
        sinks = self._sinks
        start = 0
        for place, (number, count) in enumerate(zip(numbers, counts, strict=True)):
            finish = finishes.pop(number, None) if last_place.get(number) == place else None
            sink = sinks.get(number) if finish is None else sinks.pop(number, None)
            if sink is not None:  # else it was aborted here, and the engine did not know yet
                self._deliver(number, sink, token_ids[start : start + count], logprobs, start, finish)
            start += count

    def _deliver(
        self,
        number: int,
        sink: OutputSink,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        """One request's tokens; what goes wrong with them ends this request alone."""
        try:
            sink.on_tokens(token_ids, logprobs, first_row, finish)
        except Exception as error:
            self.abort(number, sink)
            sink.on_error(error)

    def _on_unsendable(self, number: int, error: Exception) -> None:
        if (sink := self._sinks.pop(number, None)) is not None:
            sink.on_error(error)


def _to_error(failure: RequestFailure) -> TriptychError:
    description = failure.message.removeprefix(f"{failure.field}: ")
    violations = [FieldViolation(failure.field, description)] if failure.field else []
    return error_from_code(failure.code, failure.message, violations, failure.retry_after_ms / 1000)
