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
        self.is_overrun = False

    def put(self, item: OutputBatch | EngineWelcome) -> None:
        """Queue one message; past the bound the session is overrun and its stream ends."""
        if self._is_closed:
            return
        if len(self._pending) >= MAX_PENDING:
            self.is_overrun = True
            self._pending.clear()
        else:
            self._pending.append(item)
        self._news.set()

    def close(self) -> None:
        """Let the reader finish what is pending, then end."""
        self._is_closed = True
        self._news.set()

    async def messages(self) -> AsyncIterator[OutputBatch | EngineWelcome]:
        """Everything put in, in order.

        Raises:
            EngineFailure: the reader fell too far behind.
        """
        while True:
            while self._pending:
                yield self._pending.popleft()
            if self.is_overrun:
                raise EngineFailure(f"the frontend is more than {MAX_PENDING} output batches behind")
            if self._is_closed:
                return
            self._news.clear()
            await self._news.wait()
