"""Where one frontend's output batches wait for its stream: bounded, and merged by nobody."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from triptych.errors import EngineFailure
from triptych.types.outputs import OutputBatch
from triptych.types.submit import EngineWelcome

# A frontend drains its stream as fast as the network takes it; one that is this many steps behind is
# stuck, and its requests only hold blocks that others could use.
MAX_PENDING = 4096


class Outbox:
    """One session's way out. Written by the engine loop, read by the door's handler."""

    def __init__(self) -> None:
        self._pending: deque[OutputBatch | EngineWelcome] = deque()
        self._news = asyncio.Event()
        self._is_closed = False
        self._error: Exception | None = None
        self.is_overrun = False

    def put(self, item: OutputBatch | EngineWelcome) -> None:
        """Queue one message; past the bound the session is overrun and gets nothing more."""
        if self._is_closed or self.is_overrun:
            return
        if len(self._pending) >= MAX_PENDING:
            self.is_overrun = True
            self._pending.clear()
        else:
            self._pending.append(item)
        self._news.set()

    def close(self, error: Exception | None = None) -> None:
        """Let the reader finish what is pending, then end, with `error` if that is why."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
        self._news.set()

    async def messages(self) -> AsyncIterator[OutputBatch | EngineWelcome]:
        """Everything put in, in order.

        Raises:
            EngineFailure: the reader fell too far behind.
            Exception: what the session was closed with.
        """
        while True:
            while self._pending:
                yield self._pending.popleft()
            if self.is_overrun:
                raise EngineFailure(f"the frontend is more than {MAX_PENDING} output batches behind")
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return
            self._news.clear()
            await self._news.wait()
