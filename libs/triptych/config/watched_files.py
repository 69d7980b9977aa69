"""A value that is read from files, and read again when one of them changes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""A changed file is noticed at the first use that comes so long after the last look."""

Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Modification time in ns, size and inode of each file, None for one that is missing."""

_T = TypeVar("_T")


class WatchedFiles(Generic[_T]):
    """Looks at its files only when the value is used, at most once per second. Nothing runs in between.

    May be used from any thread: gRPC asks for certificates on its own.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _T], *, what: str) -> None:
        """Read the value for the first time.

        Args:
            read: Returns the value, or raises ConfigError naming the file and what is wrong with it.
            what: Names the value in the log.

        Raises:
            ConfigError: The files cannot be used.
        """
        self._paths = paths
        self._read = read
        self._what = what
        self.signature = signature_of(paths)
        """The files as they were read last, whether or not they could be used."""
        self._value = read()
        self._lock = threading.Lock()
        self._next_look_s = time.monotonic() + CHECK_INTERVAL_S

    def get(self) -> _T:
        """Return the value of the files as they are now, or the last one that could be used."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + CHECK_INTERVAL_S
                self._look()
            return self._value

    def _look(self) -> None:
        signature = signature_of(
            self._paths
        )  # before the files are read: a later change is then seen next time
        if signature == self.signature:
            return
        self.signature = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("%s changed and cannot be used, the old stay in use: %s", self._what, error)
        else:
            log.info("%s read again", self._what)


def signature_of(paths: Sequence[Path]) -> Signature:
    """Return what changes when one of the files is replaced or written to."""
    return tuple(_signature_of_one(path) for path in paths)


def _signature_of_one(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
