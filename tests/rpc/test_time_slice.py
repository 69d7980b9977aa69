"""How long threads of services keep a core."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests.helpers.time_slice import needs_slices, read_slice
from triptych.rpc.time_slice import SERVICE_NS, set_time_slice


@needs_slices
def test_slice_is_of_all_threads_and_of_what_they_start() -> None:
    default, may_end, others = read_slice(), threading.Event(), list[int]()
    other = threading.Thread(target=may_end.wait)
    other.start()
    child = None
    try:
        set_time_slice(SERVICE_NS)
        assert [read_slice(thread) for thread in (0, other.native_id)] == [SERVICE_NS] * 2
        later = threading.Thread(target=lambda: others.append(read_slice()))
        later.start()
        later.join()
        child = subprocess.Popen(["sleep", "60"])
        assert [*others, read_slice(child.pid)] == [SERVICE_NS] * 2
    finally:
        may_end.set()
        set_time_slice(0)
        if child is not None:
            child.kill()
            child.wait()
    assert read_slice() == default


@needs_slices
def test_policy_and_niceness_stay() -> None:
    code = (
        "import os\n"
        "from tests.helpers.time_slice import read_slice\n"
        "from triptych.rpc.time_slice import set_time_slice\n"
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n"
        "os.nice(3)\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "set_time_slice(200_000)\n"
        "print(read_slice() == 200_000, os.sched_getscheduler(0) == os.SCHED_BATCH,\n"
        "      os.getpriority(os.PRIO_PROCESS, 0) == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_other_systems_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_slice()
    monkeypatch.setattr(sys, "platform", "darwin")
    set_time_slice(SERVICE_NS)
    monkeypatch.undo()
    assert read_slice() == before
