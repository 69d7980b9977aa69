"""What waits to be written to one engine, and what may have to be written again: submissions and aborts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from triptych.errors import InvalidRequest, ProtocolViolation, QueueFull
from triptych.internal.v1 import engine_core_pb2, worker_pb2
from triptych.types.submit import MAX_SUBMIT_BYTES, SubmitRequest
from triptych.wire.columns import u32_to_bytes
from triptych.wire.engine_core import submit_to_proto

MAX_UNCONFIRMED = 32768
"""Choices that the engine has not confirmed: it takes submissions in microseconds, so as many wait only where it has
stopped reading. Twice the largest n, so that one request never fills it."""
MAX_UNCONFIRMED_BYTES = 128 << 20
_RETRY_AFTER_S = 1.0
_BATCH_BYTES = 1 << 20  # of one message: far below the limit, and short to (de)serialise
_BATCH_REQUESTS = 256  # in one message: both ends serve others between two of them
_ABORTS_PER_MESSAGE = 1 << 16


class Outbox:
    """One session's way up, over all its streams. Written by the requests, drained by one writer at a time.

    Messages that take effect (submit, abort) are counted from the session's start, here and by the engine,
    and kept until it confirms them; a new stream begins with those that it has not.
    """

    def __init__(self, on_unsendable: Callable[[Sequence[int], Exception], None]) -> None:
        """
        Args:
            on_unsendable: Called with the numbers and the error of a request that cannot be put into a message.
        """
        self._unsent: dict[_Unsent, None] = {}
        """In order of arrival."""
        self._number_to_unsent: dict[int, _Unsent] = {}
        """By the number of each choice."""
        self._aborts: list[int] = []
        self._messages: deque[engine_core_pb2.ConnectRequest] = deque()
        self._load = _Load()
        """Of what is unsent or not confirmed."""
        self._message_loads: deque[_Load] = deque()
        """Parallel to `_messages`."""
        self._num_confirmed = 0  # the messages before those
        self._batch_to_acknowledge = 0
        self._is_leaving = False
        self._news = asyncio.Event()
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

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a message has been packed that the engine has not confirmed."""
        return bool(self._messages)

    def submit(self, request: SubmitRequest) -> None:
        unsent = _Unsent(request)
        self._unsent[unsent] = None
        self._number_to_unsent.update(dict.fromkeys(request.numbers.tolist(), unsent))
        self._load.add(request.num_choices, request.num_bytes)
        self._news.set()

    def abort(self, number: int) -> None:
        """End one choice at the engine; a request that is unsent with all its choices aborted is never sent."""
        unsent = self._number_to_unsent.pop(number, None)
        if unsent is None:
            self._aborts.append(number)
            self._news.set()
            return
        unsent.aborted.append(number)
        if len(unsent.aborted) == unsent.request.num_choices:
            del self._unsent[unsent]
            self._load.remove(unsent.request.num_choices, unsent.request.num_bytes)

    def acknowledge(self, batch_id: int) -> None:
        """Tell the engine that it need not keep the output batches up to this one."""
        self._batch_to_acknowledge = batch_id
        self._news.set()

    def leave(self) -> None:
        """Say goodbye after what waits; nothing follows it."""
        self._is_leaving = True
        self._news.set()

    def confirm(self, num_messages: int) -> None:
        """So many messages, of all that were ever written, have taken effect.

        Raises:
            ProtocolViolation: more than there were.
        """
        num_written = self._num_confirmed + len(self._messages)
        if num_messages > num_written:
            raise ProtocolViolation(f"the engine has received {num_messages} messages of {num_written}")
        while self._num_confirmed < num_messages:
            self._messages.popleft()
            load = self._message_loads.popleft()
            self._load.remove(load.num_choices, load.num_bytes)
            self._num_confirmed += 1

    async def write_to(self, call: grpc.aio.StreamStreamCall) -> None:
        """Write what is not confirmed, then what comes, until the goodbye or the end of the stream (raises).

        What gathers while a write waits goes out together.
        """
        next_message = self._num_confirmed
        while True:
            self._news.clear()
            if next_message == self._num_confirmed + len(self._messages):
                self._pack()
            if self._batch_to_acknowledge:
                seen, self._batch_to_acknowledge = self._batch_to_acknowledge, 0
                await call.write(engine_core_pb2.ConnectRequest(last_batch_seen=seen))
            elif next_message < self._num_confirmed + len(self._messages):
                await call.write(self._messages[next_message - self._num_confirmed])
                next_message += 1
            elif self._is_leaving:
                await call.write(engine_core_pb2.ConnectRequest(goodbye=worker_pb2.Goodbye()))
                return
            else:
                await self._news.wait()

    def _pack(self) -> None:
        """Move what waits into messages: aborts first, as they free what submissions may need."""
        if self._aborts:
            aborts, self._aborts = self._aborts[:_ABORTS_PER_MESSAGE], self._aborts[_ABORTS_PER_MESSAGE:]
            column = u32_to_bytes(np.array(aborts, dtype=np.uint32))
            self._keep(engine_core_pb2.ConnectRequest(abort=column), _Load())
        if self._unsent:
            self._keep(*self._next_batch())

    def _keep(self, message: engine_core_pb2.ConnectRequest, load: _Load) -> None:
        self._messages.append(message)
        self._message_loads.append(load)

    def _next_batch(self) -> tuple[engine_core_pb2.ConnectRequest, _Load]:
        batch, load = engine_core_pb2.SubmitBatch(), _Load()
        while self._unsent and len(batch.requests) < _BATCH_REQUESTS:
            unsent = next(iter(self._unsent))
            request = unsent.request
            if load.num_bytes and load.num_bytes + request.num_bytes > _BATCH_BYTES:
                break
            del self._unsent[unsent]
            numbers = request.numbers.tolist()
            for number in numbers:
                self._number_to_unsent.pop(number, None)
            try:
                batch.requests.append(submit_to_proto(request))
            except (ValueError, TypeError) as error:  # a value that parsing let through: our bug, its loss
                self._load.remove(request.num_choices, request.num_bytes)
                self._on_unsendable(numbers, error)
            else:
                self._aborts += unsent.aborted  # for the message behind this one
                load.add(request.num_choices, request.num_bytes)
        return engine_core_pb2.ConnectRequest(submit=batch), load


@dataclass(slots=True, eq=False)
class _Unsent:
    """A request that is in no message yet."""

    request: SubmitRequest
    aborted: list[int] = field(default_factory=list)
    """Numbers of the choices that have been aborted meanwhile."""


@dataclass(slots=True)
class _Load:
    """How much of something there is."""

    num_choices: int = 0
    num_bytes: int = 0

    def add(self, num_choices: int, num_bytes: int) -> None:
        self.num_choices += num_choices
        self.num_bytes += num_bytes

    def remove(self, num_choices: int, num_bytes: int) -> None:
        self.num_choices -= num_choices
        self.num_bytes -= num_bytes
