"""What waits to be written to one engine, and what may have to be written again: submissions and aborts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc.aio
import numpy as np

from triptych.errors import ProtocolViolation, QueueFull
from triptych.internal.v1 import engine_core_pb2, worker_pb2
from triptych.types.submit import SubmitRequest
from triptych.wire.columns import u32_to_bytes
from triptych.wire.engine_core import submit_to_proto

# The engine takes submissions in microseconds; as many as this wait only if it has stopped reading.
# Twice the largest n, so that one request never fills it.
MAX_UNSENT = 32768
_RETRY_AFTER_S = 1.0
_BATCH_BYTES = 1 << 20  # of prompts in one message: far below the limit, and short to (de)serialise


class Outbox:
    """One session's way up, over all its streams. Written by the requests, drained by one writer at a time.

    Messages that take effect (submit, abort) are counted from the session's start, here and by the engine,
    and kept until it confirms them; a new stream begins with those that it has not.
    """

    def __init__(self, on_unsendable: Callable[[int, Exception], None]) -> None:
        """`on_unsendable` is told number and error of a submission that cannot be put into a message."""
        self._unsent: dict[int, SubmitRequest] = {}
        self._aborts: list[int] = []
        self._messages: deque[engine_core_pb2.ConnectRequest] = deque()
        self._num_confirmed = 0  # the messages before those
        self._batch_to_acknowledge = 0
        self._is_leaving = False
        self._news = asyncio.Event()
        self._on_unsendable = on_unsendable

    def check_room(self) -> None:
        """Raise QueueFull where the engine has stopped reading."""
        if len(self._unsent) >= MAX_UNSENT:
            raise QueueFull(
                f"{len(self._unsent)} requests wait to be sent to the engine, the limit is {MAX_UNSENT}",
                _RETRY_AFTER_S,
            )

    def submit(self, request: SubmitRequest) -> None:
        self._unsent[request.number] = request
        self._news.set()

    def abort(self, number: int) -> None:
        if self._unsent.pop(number, None) is None:  # else the engine has never heard of it
            self._aborts.append(number)
            self._news.set()

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
            column = u32_to_bytes(np.array(self._aborts, dtype=np.uint32))
            self._aborts.clear()
            self._messages.append(engine_core_pb2.ConnectRequest(abort=column))
        if self._unsent:
            self._messages.append(engine_core_pb2.ConnectRequest(submit=self._next_batch()))

    def _next_batch(self) -> engine_core_pb2.SubmitBatch:
        batch = engine_core_pb2.SubmitBatch()
        num_bytes = 0
        while self._unsent and num_bytes < _BATCH_BYTES:
            number = next(iter(self._unsent))
            request = self._unsent.pop(number)
            num_bytes += request.token_ids.nbytes
            try:
                batch.requests.append(submit_to_proto(request))
            except (ValueError, TypeError) as error:  # a value that parsing let through: our bug, its loss
                self._on_unsendable(number, error)
        return batch
