"""What waits to be written to one engine's stream: submissions in batches, aborts as a column."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio
import numpy as np

from triptych.errors import QueueFull
from triptych.internal.v1 import engine_core_pb2
from triptych.types.submit import SubmitRequest
from triptych.wire.columns import u32_to_bytes
from triptych.wire.engine_core import submit_to_proto

log = logging.getLogger(__name__)

# The engine takes submissions in microseconds; as many as this wait only if it has stopped reading.
# Twice the largest n, so that one request never fills it.
MAX_UNSENT = 32768
_RETRY_AFTER_S = 1.0
_BATCH_BYTES = 1 << 20  # of prompts in one message: far below the limit, and short to (de)serialise


class Outbox:
    """One stream's way up. Written by the requests, drained by one writer task."""

    def __init__(self, on_unsendable: Callable[[int, Exception], None]) -> None:
        """`on_unsendable` is told number and error of a submission that cannot be put into a message."""
        self._unsent: dict[int, SubmitRequest] = {}
        self._aborts: list[int] = []
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

    async def write_to(self, call: grpc.aio.StreamStreamCall) -> None:
        """Write until the stream ends, which raises. What gathers while a write waits goes out together."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._aborts or self._unsent:
                if self._aborts:
                    column = u32_to_bytes(np.array(self._aborts, dtype=np.uint32))
                    self._aborts.clear()
                    await call.write(engine_core_pb2.ConnectRequest(abort=column))
                if self._unsent:
                    await call.write(engine_core_pb2.ConnectRequest(submit=self._next_batch()))

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
