"""For how long a thread keeps a core that others wait for.

Linux lets a thread that has a core compute to the end of its slice, 1 to 3 ms, before another one that wakes gets it.
A thread that has asked for a shorter slice than the running one's gets the core at once, if it has not had its share:
sched(7), `sched_runtime` of sched_setattr(2), since Linux 6.12. Older ones ignore it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys

SERVICE_NS = 400_000
"""Shorter than the system's, 0.7 to 2.8 ms by the number of cores. At 0.1, the shortest there is, two cores answered a
tenth fewer requests where both were in use: services interrupt each other, too."""

_MACHINE_TO_CALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr, which the C library has not had for long
_KEEP_POLICY = 8  # linux/sched.h
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def set_time_slice(slice_ns: int) -> None:
    """Set the slice of all threads of this process, and of the threads and processes that they start from now on.

    Nothing changes where the system refuses it, as sandboxes may, or has no such call.

    Args:
        slice_ns: Nanoseconds; 0: the system's.
    """
    call = _MACHINE_TO_CALL.get(os.uname().machine) if sys.platform == "linux" else None
    if call is None:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, _KEEP_POLICY, niceness, 0, slice_ns, 0, 0)
            ctypes.CDLL(None).syscall(call, thread, attributes, 0)
