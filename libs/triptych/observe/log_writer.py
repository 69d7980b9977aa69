"""Writes log lines together: one write for all that come within 50 ms, for a service that logs each request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TextIO

INTERVAL_S = 0.05
MAX_LINES = 16_384
MAX_CHARACTERS = 8 << 20
_FLUSH_S = 1.0  # for a write under way to end; a stream that takes nothing must not keep a process alive


class BatchingHandler(logging.Handler):
    """Writes to a stream on a thread of its own, so that those who log do not wait for it.

    line ──► queue ──► thread, 50 ms after the first line ──► one write
               └─────► WARNING and above: written before the call returns, behind the lines before it

    Where the stream takes nothing, the queue fills up and further lines are dropped. A line behind the gap says how
    many. Lines of the last 50 ms are lost if the process is killed; `flush` writes them before any other end.
    """

    def __init__(
        self, stream: TextIO, *, max_lines: int = MAX_LINES, max_characters: int = MAX_CHARACTERS
    ) -> None:
        """
        Args:
            max_lines: Lines that may wait.
            max_characters: Characters that may wait, of all lines.
        """
        super().__init__()
        self._stream = stream
        self._max_lines = max_lines
        self._max_characters = max_characters
        self._queue: deque[str] = deque()
        self._num_characters = 0
        self._num_dropped = 0
        self._queue_lock = threading.Lock()
        """Guards the queue and its counts; held for moments."""
        self._has_lines = threading.Event()
        self._stream_lock = threading.Lock()
        """Held by the thread that writes."""
        threading.Thread(target=self._write_for_ever, name="write-log", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        is_handled = bool(super().handle(record))
        if is_handled and record.levelno >= logging.WARNING:
            self._write(wait_s=0.0)  # if another thread writes now, it goes on with this line
        return is_handled

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._queue_lock:
            num_characters = self._num_characters + len(line)
            if len(self._queue) >= self._max_lines or num_characters > self._max_characters:
                self._num_dropped += 1
            else:
                self._queue.append(line)
                self._num_characters = num_characters
        self._has_lines.set()

    def flush(self) -> None:
        """Write what waits. Return after a moment if the stream takes nothing."""
        self._write(wait_s=_FLUSH_S)

    def _write_for_ever(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(INTERVAL_S)
            self._has_lines.clear()
            self._write(wait_s=_FLUSH_S)

    def _write(self, *, wait_s: float) -> None:
        """Write what waits, unless another thread still writes after so many seconds."""
        if not self._stream_lock.acquire(timeout=wait_s):
            return
        num_dropped = 0
        try:
            while lines := self._take():
                num_dropped = len(lines)
                self._stream.write("".join(lines))
                self._stream.flush()
        except (
            OSError,
            ValueError,
        ):  # a reader that is gone, or comes back; ValueError: the stream is closed
            with self._queue_lock:
                self._num_dropped += num_dropped
        finally:
            self._stream_lock.release()

    def _take(self) -> list[str]:
        """Return all lines that wait, with one that says how many are missing behind them."""
        with self._queue_lock:
            lines, num_dropped = [*self._queue], self._num_dropped
            self._queue.clear()
            self._num_characters = self._num_dropped = 0
        if num_dropped:
            message = "%d log lines were dropped here: the log's reader is too slow"
            arguments = (num_dropped,)
            gap = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, arguments, None)
            lines.append(self.format(gap) + "\n")
        return lines
