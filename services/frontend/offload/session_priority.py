"""The priority of a session, beside other sessions.

Linux groups processes by session (`sched_autogroup_enabled`), and the niceness of a process counts only within its
group. Each service of a stack has a session: in that of the frontend a child process would take as much of a core as
the engine core or the worker, at any niceness. The niceness of a group is that of `/proc/PID/autogroup`.

    /autogroup-7 nice 0
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from io import FileIO

log = logging.getLogger(__name__)

NICENESS = 10  # as `limited_child.py` has within its group
_MAX_NICENESS = 19
_NUM_TRIES = 30
_HAS_ENDED = (errno.ESRCH, errno.EINVAL)  # gone, or not yet taken note of by its parent
_RETRY_S = 0.1  # so often one process of the whole system may set a group, unless it is root


class SessionPriority:
    """Owned by the `LimitedProcess` that leads the session; used by threads.

    It does nothing where the system has no such groups.
    """

    def __init__(self, leader: int) -> None:
        """`leader`: a process that leads a session of its own."""
        self._lock = threading.Lock()
        """Guards the niceness."""
        self._inherited, self._niceness = 0, 0
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):  # there are none, or they may not be set, or the process has ended
            self._inherited = _read_niceness(FileIO("/proc/self/autogroup"))
            # An open file is of this process, also when another one has its number.
            self._file = FileIO(f"/proc/{leader}/autogroup", "r+")

    def lower(self) -> None:
        """Let other sessions go first."""
        self._set(min(self._inherited + NICENESS, _MAX_NICENESS))

    def restore(self) -> None:
        """Give the session the priority of this process's."""
        self._set(self._inherited)

    def _set(self, niceness: int) -> None:
        with self._lock:
            if self._file is None or niceness == self._niceness:
                return
            for tries_left in reversed(range(_NUM_TRIES)):
                try:
                    self._file.write(str(niceness).encode())
                    self._niceness = niceness
                    return
                except OSError as error:
                    if error.errno in _HAS_ENDED:
                        return
                    if error.errno != errno.EAGAIN or not tries_left:
                        log.warning("the session's niceness cannot be set to %d: %s", niceness, error)
                        return
                time.sleep(_RETRY_S)


def _read_niceness(file: FileIO) -> int:
    """Return the niceness of a group; 0 of a process that is in none."""
    with file:
        words = file.read().split()
    return int(words[2]) if words else 0
