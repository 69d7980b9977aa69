"""`python -m triptych.launcher.child PARENT_PID MODULE`: run a module that dies with its parent.

Its arguments come on stdin, as a list in JSON, when the parent knows them. Until then it imports what the module needs,
so that the services of a stack, each of which needs an address of another one, start at the same time.

A program of its own instead of a preexec_fn: code between fork and exec of a process with threads may
deadlock, and only the child can set its own parent-death signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.5  # between two looks at the parent, where the system sends no signal


def main() -> None:
    """SIGTERM comes when the *thread* that started us ends (prctl(2)): that is the cluster's supervisor. Where the
    system is not Linux, it comes when the process that started us has ended."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if sys.platform != "linux":
        threading.Thread(target=end_with_parent, args=(parent_pid,), name="parent", daemon=True).start()
    elif ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM)) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused; the process would outlive its parent")
    if os.getppid() != parent_pid:  # it died before the call took effect
        raise SystemExit(f"{module}: process {parent_pid}, which started this one, is gone")
    import_ahead(module)
    try:
        arguments = json.load(sys.stdin)
    except ValueError:
        raise SystemExit(f"{module}: process {parent_pid} has given no arguments") from None
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def import_ahead(service: str) -> None:
    """Import the app of a service that is a package, without looking for garbage in what is made to stay: a tenth of
    the time."""
    spec = importlib.util.find_spec(service)
    if spec is None or spec.submodule_search_locations is None:
        return
    gc.disable()
    try:
        with contextlib.suppress(ImportError):  # the run that follows says what is missing
            importlib.import_module(f"{service}.app")
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent(parent_pid: int) -> None:
    """Send this process SIGTERM once it has another parent."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
