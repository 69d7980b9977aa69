"""A line on stderr with the progress of a download or conversion."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

REFRESH_S = 0.2


class ProgressLine:
    """`label: status` on one line, refreshed while the `with` block runs; a plain log gets start and end only.

    `status` is called on a thread of this class, every `REFRESH_S`; it must be quick and must not raise.
    """

    def __init__(self, label: str, status: Callable[[], str] | None = None, *, enabled: bool = True) -> None:
        self._label = label
        self._status = status
        self._enabled = enabled
        self._started = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="progress", daemon=True)

    def __enter__(self) -> ProgressLine:
        self._started = time.monotonic()
        if self._enabled and sys.stderr.isatty():
            self._thread.start()
        elif self._enabled:
            self._write(f"{self._label} …\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._enabled:
            outcome = "done" if kind is None else "failed"
            line = f"{self._label}: {outcome} after {time.monotonic() - self._started:.1f} s"
            self._write(f"\r\033[K{line}\n" if self._thread.ident is not None else f"{line}\n")

    def _refresh(self) -> None:
        while not self._done.wait(REFRESH_S):
            status = self._status() if self._status else f"{time.monotonic() - self._started:.0f} s"
            self._write(f"\r\033[K{self._label}: {status}")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
