"""An EngineCoreService whose tokens a test chooses: by hand, or by a function of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, SessionTerms
from triptych.rpc.tls import ServerTls
from triptych.types.facts import EngineCounters, EngineStatus, ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.outputs import (
    FinishedRequest,
    FinishReason,
    OutputBatch,
    RequestFailure,
    StageTimings,
)
from triptych.types.sampling import MAX_CHOICES
from triptych.types.step import LogprobColumns, RequestGuesses
from triptych.types.submit import EngineLimits, EngineWelcome, SubmitRequest
from triptych.wire.admin import status_to_proto
from triptych.wire.columns import u32_from_bytes
from triptych.wire.engine_core import outputs_to_proto, submit_from_proto, welcome_to_proto

MODEL = ModelFacts(
    name="tiny",
    identity=ModelIdentity("0" * 64, weights="1" * 64, numerics="fake", is_batch_invariant=True),
    vocab_size=300,
    max_model_len=64,
    eos_token_ids=(299,),
    dtype="float32",
    kv_dtype="float32",
    quantization="none",
)
TIMINGS = StageTimings(queued_ns=1, prefill_ns=2, decode_ns=3)
NUM_CACHED = 4
DEADLINE_S = 60.0  # how long a test waits for what must come


@dataclass(frozen=True, eq=False)
class SubmittedChoice:
    """One choice of what a frontend has submitted."""

    request: SubmitRequest
    index: int
    number: int

    @property
    def request_id(self) -> str:
        """The request's, with the choice's index where there are several."""
        is_lone = self.request.num_choices == 1
        return self.request.head.request_id if is_lone else f"{self.request.head.request_id}#{self.index}"

    @property
    def seed(self) -> int:
        return int(self.request.seeds[self.index])

    @property
    def token_ids(self) -> np.ndarray:
        return self.request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    def __getattr__(self, name: str) -> Any:
        """Return a field that all choices of the request share."""
        return getattr(self.request, name)


Reply = Callable[[SubmittedChoice], Iterable[int]]
Pool = Callable[[SubmittedChoice], np.ndarray]
"""A pooled request -> its vectors [num_vectors, num_columns]."""


def u32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.uint32)


async def eventually(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`; fails if none comes in time."""
    async with asyncio.timeout(DEADLINE_S):
        while not (value := condition()):
            await asyncio.sleep(0.002)
        return value


class Cut:
    """Put into a stream's queue: it breaks there."""


@dataclass(eq=False)
class _Stream:
    """One frontend's session, with its latest connection."""

    name: str
    outgoing: asyncio.Queue[engine_core_pb2.ConnectResponse | Cut | None] = field(
        default_factory=asyncio.Queue
    )
    batches: list[engine_core_pb2.OutputBatch] = field(default_factory=list)
    messages_received: int = 0
    last_acknowledged: int = 0
    alive: dict[int, SubmittedChoice] = field(default_factory=dict)


class FakeEngine(engine_core_pb2_grpc.EngineCoreServiceServicer):
    """Use as an async context manager. Answers an abort as the real engine does: with the request's end.

    Args:
        reply: request -> its output tokens (as many as you like), sent one per batch until max_tokens or
            an end token. None: the test sends everything after the admission.
        pool: pooled request -> its vectors. None: as `reply`.
        is_mute: takes requests and never says anything.
        resume_ttl_s: what the welcome says of it; above 0 a broken stream's session is kept for ever.
    """

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        model: ModelFacts = MODEL,
        engine_id: str = "engine-0",
        is_ready: bool = True,
        has_priorities: bool = True,
        is_mute: bool = False,
        resume_ttl_s: float = 0.0,
        max_choices: int = MAX_CHOICES,
        max_running: int = 0,
        pool: Pool | None = None,
    ) -> None:
        self.reply = reply
        self.pool = pool
        self._is_mute = is_mute
        self._resume_ttl_s = resume_ttl_s
        self._streams: list[_Stream] = []
        self._welcome = EngineWelcome(
            engine_id=engine_id,
            ready=is_ready,
            why_not_ready="" if is_ready else "loading",
            model=model,
            limits=EngineLimits(has_priorities, max_choices, max_running=max_running),
        )
        self._server: RpcServer | None = None
        self.tls: ServerTls | None = None
        """Counts from the next `start` on."""
        self.port = 0
        self.submitted: list[SubmittedChoice] = []
        self.is_frozen = False
        """It gives no sign of life, though its streams stand."""
        self.num_beats = 0
        """Signs of life that it was asked for, and gave."""
        self.aborted: list[str] = []
        """Request ids, in order."""
        self.hellos: list[engine_core_pb2.ConnectHello] = []
        self.states: list[bool] = []
        """Whether streams can go on at its frontend, each time that it has said so."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_alive(self) -> int:
        return sum(len(stream.alive) for stream in self._streams)

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def start(self) -> None:
        """Serve; after a death, on the same port as before."""
        self._server = RpcServer(services=("x",), limit_bytes=INTERNAL_MESSAGE_BYTES, tls=self.tls)
        engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server.grpc)
        self.admin = _Admin(self._welcome)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self._server.grpc)
        self.port = self._server.bind("127.0.0.1", self.port, option="fake")
        await self._server.start()

    async def die(self) -> None:
        """End every stream at once, with no farewell."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def close_streams(self) -> None:
        """End every stream in order, and go on serving."""
        for stream in self._streams:
            stream.outgoing.put_nowait(None)

    def cut_streams(self) -> None:
        """Break every stream behind what was sent, and go on serving."""
        for stream in self._streams:
            stream.outgoing.put_nowait(Cut())

    def forget_sessions(self) -> None:
        """As if another process served here."""
        self._streams.clear()

    def send_again(self, batch_id: int) -> None:
        """Send a batch that was sent before, on every stream."""
        for stream in self._streams:
            _put(stream, outputs=stream.batches[batch_id - 1])

    def lose_batch(self, request: SubmittedChoice, token_ids: Sequence[int]) -> None:
        """Keep a batch for a resumed stream, and do not send it now."""
        stream = next(s for s in self._streams if s.alive.get(request.number) is request)
        batch = OutputBatch(len(stream.batches) + 1, numbers=u32([request.number]), token_ids=u32(token_ids))
        stream.batches.append(outputs_to_proto(batch, stream.messages_received))

    def forget_batch(self) -> None:
        """On every stream, leave a gap that no resumed stream will fill."""
        for stream in self._streams:
            batch = engine_core_pb2.OutputBatch(batch_id=len(stream.batches) + 2)
            stream.batches.append(batch)
            _put(stream, outputs=batch)

    @property
    def last_acknowledged(self) -> list[int]:
        """Return, for each stream, the last output batch that its frontend has acknowledged."""
        return [stream.last_acknowledged for stream in self._streams]

    def set_ready(self, is_ready: bool, why: str = "") -> None:
        self._welcome = replace(self._welcome, ready=is_ready, why_not_ready=why)
        for stream in self._streams:
            _put(stream, welcome=welcome_to_proto(self._welcome))

    async def next_submit(self, index: int = 0) -> SubmittedChoice:
        """The request number `index` of all that were ever submitted."""
        await eventually(lambda: len(self.submitted) > index)
        return self.submitted[index]

    def emit(
        self,
        request: SubmittedChoice,
        token_ids: Sequence[int] = (),
        *,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        logprobs: LogprobColumns | None = None,
        first_cached_tokens: int | None = None,
        guesses: tuple[int, int] = (0, 0),
    ) -> None:
        """Send one batch that holds this request alone.

        Args:
            first_cached_tokens: Say that these are its first tokens, and that so many of its prompt were cached. None:
                say nothing, as an engine of the version before.
            guesses: Accepted and rejected ones so far; (0, 0): there were none.
        """
        finished = ()
        if finish is not None:
            finished = (FinishedRequest(request.number, finish, stop_token_id, NUM_CACHED, TIMINGS),)
        self.send(
            request,
            OutputBatch(
                0,
                numbers=u32([request.number] if len(token_ids) else []),
                token_counts=u32([len(token_ids)] if len(token_ids) else []),
                token_ids=u32(token_ids),
                finished=finished,
                logprobs=logprobs,
                first_numbers=u32([] if first_cached_tokens is None else [request.number]),
                first_cached_tokens=u32([] if first_cached_tokens is None else [first_cached_tokens]),
                guesses=RequestGuesses.of({request.number: guesses} if any(guesses) else {}),
            ),
        )

    def fail(
        self, request: SubmittedChoice, code: str, message: str, *, field: str = "", retry_after_ms: int = 0
    ) -> None:
        failure = RequestFailure(request.number, code, message, field, retry_after_ms)
        self.send(request, OutputBatch(0, failures=(failure,)))

    def send(self, request: SubmittedChoice, batch: OutputBatch) -> None:
        """Send a batch on the stream that `request` came on."""
        stream = next(s for s in self._streams if s.alive.get(request.number) is request)
        for end in (*batch.finished, *batch.failures):
            stream.alive.pop(end.number, None)
        batch = replace(batch, batch_id=len(stream.batches) + 1)
        stream.batches.append(outputs_to_proto(batch, stream.messages_received))
        _put(stream, outputs=stream.batches[-1])

    async def Connect(
        self, request_iterator: AsyncIterator[engine_core_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[engine_core_pb2.ConnectResponse]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        stream = next((s for s in self._streams if s.name == first.hello.session.resume_session), None)
        is_resumed = stream is not None
        if stream is None:
            stream = _Stream(f"session-{len(self.hellos)}" if self._resume_ttl_s else "")
            self._streams.append(stream)
        outgoing = stream.outgoing = asyncio.Queue()
        terms = SessionTerms(
            stream.name,
            is_resumed,
            stream.messages_received,
            self._resume_ttl_s,
            ENGINE_PROTOCOL.agree(first.hello.session),
        )
        welcome = welcome_to_proto(self._welcome)
        welcome.session.CopyFrom(terms.to_proto())
        _put(stream, welcome=welcome)
        for batch in stream.batches[first.hello.session.last_received :] if is_resumed else ():
            _put(stream, outputs=batch)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        is_over = not self._resume_ttl_s
        try:
            while (message := await outgoing.get()) is not None:
                if isinstance(message, Cut):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                yield message
            is_over = True
        finally:
            reader.cancel()
            if is_over and stream in self._streams:
                self._streams.remove(stream)

    async def _read(self, requests: AsyncIterator[engine_core_pb2.ConnectRequest], stream: _Stream) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "beat" and self.is_frozen:
                continue
            if kind == "beat":
                self.num_beats += 1
                _put(stream, welcome=welcome_to_proto(self._welcome))
                continue
            if kind == "state":
                self.states.append(message.state.takes_streams)
                view = replace(self._welcome, takes_streams=message.state.takes_streams)
                _put(stream, welcome=welcome_to_proto(view))
                continue
            if kind == "goodbye":
                stream.outgoing.put_nowait(None)
            elif kind == "last_batch_seen":
                stream.last_acknowledged = message.last_batch_seen
            else:
                stream.messages_received += 1
            for submit in message.submit.requests:
                request = submit_from_proto(submit)
                for index, number in enumerate(request.numbers.tolist()):
                    self._take(SubmittedChoice(request, index, number), stream)
            for number in u32_from_bytes(message.abort).tolist():
                request = stream.alive.get(number)
                if request is not None:
                    self.aborted.append(request.request_id)
                    self.emit(request, finish=FinishReason.ABORT)

    def _take(self, request: SubmittedChoice, stream: _Stream) -> None:
        self.submitted.append(request)
        stream.alive[request.number] = request
        if self._is_mute:
            return
        self.send(request, OutputBatch(0, admitted=u32([request.number])))
        if request.request.pooling is not None and self.pool is not None:
            finish = FinishedRequest(request.number, FinishReason.STOP, None, NUM_CACHED, TIMINGS)
            vectors = {request.number: self.pool(request)}
            self.send(request, OutputBatch(0, finished=(finish,), vectors=vectors))
            return
        if self.reply is not None:
            for place, token_id in enumerate(self.reply(request), start=1):
                ends = (*request.sampling.stop_token_ids, *self._welcome.model.eos_token_ids)  # type: ignore[union-attr]
                if token_id in ends and not request.sampling.ignore_eos:
                    self.emit(request, [token_id], finish=FinishReason.STOP, stop_token_id=token_id)
                    return
                if place == request.sampling.max_tokens:
                    self.emit(request, [token_id], finish=FinishReason.LENGTH)
                    return
                self.emit(request, [token_id])


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, welcome: EngineWelcome) -> None:
        self.calls: list[Any] = []
        """Requests of the calls that change something."""
        self._status = EngineStatus(
            engine_id=welcome.engine_id,
            ready=welcome.ready,
            why_not_ready=welcome.why_not_ready,
            num_running=3,
            num_waiting=0,
            num_blocks=8,
            num_used_blocks=2,
            num_cached_blocks=1,
            steps_in_flight=2,
            step_ns=5,
            counters=EngineCounters(num_steps=7, num_scheduled_tokens=9),
            block_size=16,
        )

    async def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(status=status_to_proto(self._status, "tiny"))

    async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[admin_pb2.WatchStatusResponse]:
        while True:
            yield admin_pb2.WatchStatusResponse(status=status_to_proto(self._status, "tiny"))
            await asyncio.sleep(0.01)

    async def Pause(self, request: Any, context: Any) -> admin_pb2.PauseResponse:
        self._note(request, paused=True)
        return admin_pb2.PauseResponse()

    async def Resume(self, request: Any, context: Any) -> admin_pb2.ResumeResponse:
        self._note(request, paused=False)
        return admin_pb2.ResumeResponse()

    async def Sleep(self, request: Any, context: Any) -> admin_pb2.SleepResponse:
        self._note(request, asleep=True)
        return admin_pb2.SleepResponse(released_bytes=100)

    async def Wake(self, request: Any, context: Any) -> admin_pb2.WakeResponse:
        self._note(request, asleep=False)
        return admin_pb2.WakeResponse()

    async def ResetPrefixCache(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCacheResponse:
        self._note(request)
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=5)

    def _note(self, request: Any, **state: bool) -> None:
        self.calls.append(request)
        self._status = replace(self._status, **state)


def _put(stream: _Stream, **message: Any) -> None:
    stream.outgoing.put_nowait(engine_core_pb2.ConnectResponse(**message))
