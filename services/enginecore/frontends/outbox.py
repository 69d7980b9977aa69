"""Where one frontend's output batches wait for its stream, and after it for the frontend's acknowledgement."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from triptych.errors import EngineFailure
from triptych.types.outputs import OutputBatch
from triptych.types.submit import EngineWelcome

# A frontend drains its stream as fast as the network takes it; one that is this many steps behind is
# stuck, and its requests only hold blocks that others could use. More than what comes of steps of 1 ms while
# a broken stream can be resumed.
MAX_PENDING = 16384
MAX_PENDING_BYTES = 256 << 20
"""Log-probabilities of 1,024 requests with 20 alternatives each are 0.2 MB a step."""


class Outbox:
    """One session's way out, over all its streams. Written by the engine loop, read by the door's handlers.

    Batches are numbered without a gap and kept until they are acknowledged; of welcomes only the latest is
    worth sending.
    """

    def __init__(self) -> None:
        self._batches: deque[OutputBatch] = deque()
        self._welcome: EngineWelcome | None = None
        self._batch_sizes: deque[int] = deque()
        """Bytes of each of `_batches`."""
        self._num_bytes = 0
        self._last_batch_id = 0
        self._reader = 0  # which of the session's streams is served: the latest, until it is told to stop
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self.is_closed = False
        self.is_overrun = False

    def put(self, item: OutputBatch | EngineWelcome) -> None:
        """Queue one message; past the bound the session is overrun and gets nothing more."""
        if self.is_closed or self.is_overrun:
            return
        if isinstance(item, EngineWelcome):
            self._welcome = item
        elif len(self._batches) >= MAX_PENDING or self._num_bytes > MAX_PENDING_BYTES:
            self.is_overrun, self._welcome = True, None
            self._batches.clear()
            self._batch_sizes.clear()
        else:
            num_bytes = item.num_bytes
            self._batches.append(item)
            self._batch_sizes.append(num_bytes)
            self._num_bytes += num_bytes
            self._last_batch_id = item.batch_id
        self._news.set()

    def acknowledge(self, batch_id: int) -> None:
        """The frontend has the batches up to this id."""
        while self._batches and self._batches[0].batch_id <= batch_id:
            self._batches.popleft()
            self._num_bytes -= self._batch_sizes.popleft()

    def can_resume_after(self, batch_id: int) -> bool:
        """Every batch behind this one is here, and the session goes on."""
        first_kept = self._batches[0].batch_id if self._batches else self._last_batch_id + 1
        is_over = self.is_closed or self.is_overrun
        return not is_over and first_kept - 1 <= batch_id <= self._last_batch_id

    def close(self, error: Exception | None = None) -> None:
        """Let the reader finish what is pending, then end, with `error` if that is why."""
        if not self.is_closed:
            self.is_closed, self._error = True, error
        self._news.set()

    def messages(self) -> AsyncIterator[OutputBatch | EngineWelcome]:
        """Everything that is not acknowledged, in order; from now on this is the only reader.

        Ends where `stop_reading` or a later call of this says so, or the outbox is closed.

        Raises:
            EngineFailure: the reader fell too far behind.
            Exception: what the session was closed with.
        """
        self.stop_reading()
        return self._messages(self._reader)

    def stop_reading(self) -> None:
        """End the reader, and nothing else."""
        self._reader += 1
        self._news.set()

    async def _messages(self, reader: int) -> AsyncIterator[OutputBatch | EngineWelcome]:
        last_sent = 0
        while self._reader == reader:
            if self._welcome is not None:
                welcome, self._welcome = self._welcome, None
                yield welcome
            elif self._batches and self._last_batch_id > last_sent:
                batch = self._batches[max(0, last_sent + 1 - self._batches[0].batch_id)]
                last_sent = batch.batch_id
                yield batch
            elif self.is_overrun:
                raise EngineFailure(
                    f"the frontend is more than {MAX_PENDING} output batches or {MAX_PENDING_BYTES} bytes behind"
                )
            elif self._error is not None:
                raise self._error
            elif self.is_closed:
                return
            else:
                self._news.clear()
                await self._news.wait()
