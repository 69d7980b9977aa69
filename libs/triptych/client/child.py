"""`python -m triptych.client.child PARENT_PID MODULE …`: run a module that dies with its parent.

A program of its own instead of a preexec_fn: code between fork and exec of a process with threads may
deadlock, and only the child can set its own parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """SIGTERM comes when the *thread* that started us ends (prctl(2)): that is the cluster's supervisor."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM)) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused; the process would outlive its parent")
    if os.getppid() != parent_pid:  # it died before the call took effect
        raise SystemExit(f"{module}: process {parent_pid}, which started this one, is gone")
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
