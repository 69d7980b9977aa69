"""The submits, aborts and detaches of one session: what waits to be written, and what the engine has not confirmed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from triptych import failpoints
from triptych.errors import InvalidRequest, QueueFull
from triptych.internal.v1 import engine_core_pb2, session_pb2
from triptych.rpc.session.replay_buffer import ReplayBuffer
from triptych.types.submit import MAX_SUBMIT_BYTES, AttachRequest, SubmitRequest
from triptych.wire.columns import u32_to_bytes
from triptych.wire.engine_core import attach_to_proto, submit_to_proto

MAX_UNCONFIRMED = 32768
"""Choices that the engine has not confirmed: it takes submissions in microseconds, so as many wait only where it has
stopped reading. Twice the largest n, so that one request never fills it."""
MAX_UNCONFIRMED_BYTES = 128 << 20
_RETRY_AFTER_S = 1.0
_BATCH_BYTES = 1 << 20  # of one message: far below the limit, and short to (de)serialise
_BATCH_REQUESTS = 256  # in one message: both ends serve others between two of them
_ABORTS_PER_MESSAGE = 1 << 16


class Outbox:
    """Packs requests and aborts into messages. Written by the requests, drained by one stream at a time.

    unsent ── pack ──► messages, kept until the engine confirms them ──► the stream that writes
    """

    def __init__(self, on_unsendable: Callable[[Sequence[int], Exception], None]) -> None:
        """
        Args:
            on_unsendable: Called with the numbers and the error of a request that cannot be put into a message.
        """
        self._unsent: dict[_Unsent, None] = {}
        """Requests that are in no message yet, in order of arrival."""
        self._number_to_unsent: dict[int, _Unsent] = {}
        """Number of each choice -> its request that is in no message yet."""
        self._num_taken = 0
        """Requests that were taken so far: each one's place in the order of arrival."""
        self._aborts: list[int] = []
        self._stops: list[int] = []
        self._attaches: deque[tuple[int, AttachRequest]] = deque()
        """(number of requests taken before it, the question). It may ask for one of those."""
        self._detaches: list[int] = []
        self._detached_behind = 0
        """Requests ahead of the last detach."""
        self.sent: ReplayBuffer[_Message] = ReplayBuffer()
        """The messages that the engine has not confirmed."""
        self._load = _Load()
        """Load of the messages that are unsent or not confirmed."""
        self._batch_to_acknowledge = 0
        self._heartbeat_is_due = False
        self._takes_streams = False
        self._is_leaving = False
        self._changed = asyncio.Event()
        self._on_unsendable = on_unsendable

    def check_free_places(self, num_choices: int, num_bytes: int) -> None:
        """Check that one more request can be taken.

        Args:
            num_bytes: What it takes in a message, at most.

        Raises:
            InvalidRequest: It can never be sent.
            QueueFull: The engine has stopped reading.
        """
        if num_bytes > MAX_SUBMIT_BYTES:
            raise InvalidRequest(
                "sampling",
                f"prompt and sampling parameters take {num_bytes} bytes, above the limit {MAX_SUBMIT_BYTES}",
            )
        load = self._load
        if (
            load.num_choices + num_choices > MAX_UNCONFIRMED
            or load.num_bytes + num_bytes > MAX_UNCONFIRMED_BYTES
        ):
            raise QueueFull(
                f"{load.num_choices} choices of {load.num_bytes} bytes wait to be taken by the engine; the limits are "
                f"{MAX_UNCONFIRMED} and {MAX_UNCONFIRMED_BYTES}",
                _RETRY_AFTER_S,
            )

    def submit(self, request: SubmitRequest) -> None:
        self._num_taken += 1
        unsent = _Unsent(request, self._num_taken, _Load(request.num_choices, request.num_bytes))
        self._unsent[unsent] = None
        self._number_to_unsent.update(dict.fromkeys(request.numbers.tolist(), unsent))
        self._load.add(unsent.load)
        self._changed.set()

    def abort(self, number: int) -> None:
        """End one choice at the engine; a request that is unsent with all its choices aborted is never sent."""
        unsent = self._number_to_unsent.pop(number, None)
        if unsent is None:
            self._aborts.append(number)
            self._changed.set()
            return
        unsent.aborted.append(number)
        if len(unsent.aborted) == unsent.request.num_choices:
            del self._unsent[unsent]
            self._load.remove(unsent.load)

    def stop(self, number: int) -> None:
        """End one choice at the engine with what it has; if it is kept, it stays kept."""
        if number in self._number_to_unsent:
            self.abort(number)
        else:
            self._stops.append(number)
            self._changed.set()

    def attach(self, request: AttachRequest) -> None:
        """Ask the engine to let a request of another session go on in this one."""
        self._attaches.append((self._num_taken, request))
        self._load.add(_Load(1, request.num_bytes))
        self._changed.set()

    def detach(self, numbers: Sequence[int]) -> None:
        """Let choices of one request wait at the engine for another reader."""
        self._detaches += numbers
        self._detached_behind = self._num_taken
        self._changed.set()

    def say_takes_streams(self, takes_streams: bool) -> None:
        """Say whether this frontend takes up streams that began elsewhere: now, and on each stream from now on."""
        self._takes_streams = takes_streams
        self._changed.set()

    def acknowledge(self, batch_id: int) -> None:
        """Acknowledge the output batches up to this one: the engine need not keep them."""
        self._batch_to_acknowledge = batch_id
        self._changed.set()

    def send_heartbeat(self) -> None:
        """Ask the engine for a sign of life."""
        self._heartbeat_is_due = True
        self._changed.set()

    def leave(self) -> None:
        """Send a goodbye behind what waits. Nothing follows it."""
        self._is_leaving = True
        self._changed.set()

    def confirm(self, number: int) -> None:
        """Forget the messages up to this number: they have taken effect.

        Raises:
            ProtocolViolation: There is no such message yet.
        """
        for message in self.sent.confirm(number):
            self._load.remove(message.load)

    async def write_to(self, call: grpc.aio.StreamStreamCall, *, tells_state: bool = False) -> None:
        """Write what is not confirmed, then what comes, until the goodbye or the end of the stream (raises).

        What gathers while a write waits goes out together.

        Args:
            tells_state: Whether the engine wants to know what this frontend does for others.
        """
        sent = self.sent
        next_number = sent.num_confirmed + 1
        told: bool | None = None
        while True:
            self._changed.clear()
            if next_number > sent.last_number:
                self._pack()
            if self._batch_to_acknowledge:
                seen, self._batch_to_acknowledge = self._batch_to_acknowledge, 0
                if failpoints.ARMED:
                    failpoints.reach("frontend.before_acknowledge")
                await call.write(engine_core_pb2.ConnectRequest(last_batch_seen=seen))
            elif tells_state and told != self._takes_streams:
                told = self._takes_streams
                state = engine_core_pb2.FrontendState(takes_streams=told)
                await call.write(engine_core_pb2.ConnectRequest(state=state))
            elif next_number <= sent.last_number:
                if failpoints.ARMED:
                    failpoints.reach("frontend.before_submit")
                await call.write(sent.get(next_number).request)
                if failpoints.ARMED:
                    failpoints.reach("frontend.after_submit")
                next_number += 1
            elif self._heartbeat_is_due:
                self._heartbeat_is_due = False
                await call.write(engine_core_pb2.ConnectRequest(beat=engine_core_pb2.Beat()))
            elif self._is_leaving:
                await call.write(engine_core_pb2.ConnectRequest(goodbye=session_pb2.Goodbye()))
                return
            else:
                await self._changed.wait()

    def _pack(self) -> None:
        """Move what waits into messages, as many as are short to pack.

        Aborts come first, because they free blocks that submissions may need. What names a request of another stream
        comes behind the requests that came before it.
        """
        if self._stops:
            stops, self._stops = self._stops[:_ABORTS_PER_MESSAGE], self._stops[_ABORTS_PER_MESSAGE:]
            self._append(stop=u32_to_bytes(np.array(stops, dtype=np.uint32)))
        if self._aborts:
            aborts, self._aborts = self._aborts[:_ABORTS_PER_MESSAGE], self._aborts[_ABORTS_PER_MESSAGE:]
            self._append(abort=u32_to_bytes(np.array(aborts, dtype=np.uint32)))
        if self._unsent:
            self.sent.append(self._next_batch())
        num_packed = next(iter(self._unsent)).place - 1 if self._unsent else self._num_taken
        for _ in range(min(len(self._attaches), _BATCH_REQUESTS)):
            num_ahead, request = self._attaches[0]
            if num_ahead > num_packed:
                break
            self._attaches.popleft()
            self._append(_Load(1, request.num_bytes), attach=attach_to_proto(request))
        if self._detaches and self._detached_behind <= num_packed:
            detaches, self._detaches = self._detaches, []
            self._append(detach=u32_to_bytes(np.array(detaches, dtype=np.uint32)))

    def _append(self, load: _Load | None = None, **message: Any) -> None:
        self.sent.append(_Message(engine_core_pb2.ConnectRequest(**message), load or _Load()))

    def _next_batch(self) -> _Message:
        batch, load = engine_core_pb2.SubmitBatch(), _Load()
        while self._unsent and len(batch.requests) < _BATCH_REQUESTS:
            unsent = next(iter(self._unsent))
            request = unsent.request
            if load.num_bytes and load.num_bytes + unsent.load.num_bytes > _BATCH_BYTES:
                break
            del self._unsent[unsent]
            numbers = request.numbers.tolist()
            for number in numbers:
                self._number_to_unsent.pop(number, None)
            try:
                batch.requests.append(submit_to_proto(request))
            except (ValueError, TypeError) as error:  # a value that parsing let through: our bug, its loss
                self._load.remove(unsent.load)
                self._on_unsendable(numbers, error)
            else:
                self._aborts += unsent.aborted  # for the message behind this one
                load.add(unsent.load)
        return _Message(engine_core_pb2.ConnectRequest(submit=batch), load)


@dataclass(slots=True, eq=False)
class _Unsent:
    """One request that is in no message yet."""

    request: SubmitRequest
    place: int
    """Its place among all requests of the session, from 1."""
    load: _Load
    aborted: list[int] = field(default_factory=list)
    """Numbers of the choices that were aborted before it was sent."""


@dataclass(slots=True)
class _Load:
    """An amount of requests, in choices and bytes."""

    num_choices: int = 0
    num_bytes: int = 0

    def add(self, other: _Load) -> None:
        self.num_choices += other.num_choices
        self.num_bytes += other.num_bytes

    def remove(self, other: _Load) -> None:
        self.num_choices -= other.num_choices
        self.num_bytes -= other.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """A message to the engine, with what it counts against the limits."""

    request: engine_core_pb2.ConnectRequest
    load: _Load
