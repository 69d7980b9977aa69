"""Ends calls whose clients have stopped reading."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from triptych.errors import DeadlineExceeded
from triptych.rpc.status import to_status


class StallWatch:
    """Ends a call whose client has stopped reading. Made inside the call's task."""

    def __init__(self, context: grpc.aio.ServicerContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._call = asyncio.current_task()
        self._writing_since: float | None = None
        self._abort: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(timeout_s, self._check)

    def begin_write(self) -> None:
        """A message is about to be written, which waits while the client does not read."""
        self._writing_since = self._loop.time()

    def end_write(self) -> None:
        self._writing_since = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        written_for_s = 0.0 if self._writing_since is None else now - self._writing_since
        if written_for_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - written_for_s, self._check)
            return
        self._abort = self._loop.create_task(self._end())

    async def _end(self) -> None:
        """Send the status behind what was written, and end the call's task, which closes the generation."""
        status = to_status(DeadlineExceeded(f"the client read nothing for {self._timeout_s:g} s"))
        if self._call is not None:
            self._loop.call_soon(self._call.cancel)
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
            await self._context.abort(status.code, status.details, status.trailing_metadata)
