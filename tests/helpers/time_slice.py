"""Reads the slices of threads, by sched_getattr(2)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

import pytest

_CALLS = {"x86_64": 315, "aarch64": 275}  # sched_getattr
_FORMAT = "=IIQiIQQQ"  # size, policy, flags, nice, priority, runtime, deadline, period
_SIZE = struct.calcsize(_FORMAT)


def read_slice(thread: int = 0) -> int:
    """Return the slice of a thread in nanoseconds; 0: it has ended, or the system has none."""
    call = _CALLS.get(os.uname().machine) if sys.platform == "linux" else None
    buffer = ctypes.create_string_buffer(_SIZE)
    if call is None or ctypes.CDLL(None).syscall(call, thread, buffer, _SIZE, 0) != 0:
        return 0
    return int(struct.unpack(_FORMAT, buffer.raw)[5])


needs_slices = pytest.mark.skipif(not read_slice(), reason="this system has no slices to choose")
