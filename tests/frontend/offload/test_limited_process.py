"""The process of limited work: its priority, and its end with the frontend."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.time_slice import needs_slices, read_slice
from triptych.errors import QueueFull
from triptych.rpc.time_slice import SERVICE_NS, set_time_slice
from triptych_services.frontend.offload import limited_process
from triptych_services.frontend.offload.limited_process import LimitedProcess

DEADLINE_S = 60.0
NICENESS = 10

SAYS_WHO_IT_IS = """
import os
def begin(message):
    return {"pid": os.getpid()}, None
"""

SAYS_WHERE_IT_RUNS = """
import os
def begin(message):
    return {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))}, None
"""

WAITS_FOR_ITS_SHARE = """
import os, time
def begin(message):
    while open("/proc/self/autogroup").read().split()[2] != message["niceness"]:
        sum(range(10_000))
    return {"pid": os.getpid()}, None
"""

COMPUTES = """
import os, sys
def begin(message):
    print(os.getpid(), file=sys.stderr, flush=True)
    while True:
        pass
"""

ASKS = """
import sys
from pathlib import Path
from triptych_services.frontend.offload.limited_process import LimitedProcess
LimitedProcess(Path(sys.argv[1])).ask({}, 600.0)
"""


needs_groups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this system does not group processes by session"
)


@dataclass(frozen=True)
class Group:
    """Processes that the kernel gives time together."""

    name: str
    niceness: int


def read_group(pid: int) -> Group:
    words = Path(f"/proc/{pid}/autogroup").read_text().split()  # /autogroup-7 nice 0, or nothing
    return Group(words[0], int(words[2])) if words else Group("", 0)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_system_without_processes_refuses_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(QueueFull, match="cannot start a process for the request: Resource") as error:
        LimitedProcess(tmp_path)
    assert error.value.retry_after_s == 1.0
    del error
    gc.collect()
    assert not unraisable


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system places processes itself")
def test_one_core_is_left_to_serving(tmp_path: Path) -> None:
    script, cpus = tmp_path / "work.py", sorted(os.sched_getaffinity(0))
    script.write_text(SAYS_WHERE_IT_RUNS)
    assert LimitedProcess(script).ask({}, DEADLINE_S)["cpus"] == (cpus[1:] or cpus)


@needs_slices
def test_a_service_that_wakes_takes_the_core(tmp_path: Path) -> None:
    script, default = tmp_path / "work.py", read_slice()
    script.write_text(SAYS_WHO_IT_IS)
    set_time_slice(SERVICE_NS)  # as a frontend has it
    try:
        child = LimitedProcess(script)
    finally:
        set_time_slice(0)
    assert read_slice(child.ask({}, DEADLINE_S)["pid"]) == default


@needs_groups
def test_nice_beside_other_sessions(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(SAYS_WHO_IT_IS)
    child, others = LimitedProcess(script), read_group(os.getpid())
    pid = child.ask({}, DEADLINE_S)["pid"]
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    assert read_group(pid).name != others.name
    wait_until(lambda: read_group(pid).niceness == min(others.niceness + NICENESS, 19))


@needs_groups
def test_message_that_waits_long_gets_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "_PATIENCE_S", 0.0)
    script = tmp_path / "work.py"
    script.write_text(WAITS_FOR_ITS_SHARE)
    child, others = LimitedProcess(script), read_group(os.getpid())
    pid = child.ask({"niceness": str(others.niceness)}, DEADLINE_S)["pid"]
    wait_until(lambda: read_group(pid).niceness == min(others.niceness + NICENESS, 19))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ends_with_frontend_while_it_computes(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(COMPUTES)
    asks = [sys.executable, "-c", ASKS, str(script)]
    with subprocess.Popen(asks, stderr=subprocess.PIPE, text=True) as frontend:
        assert frontend.stderr is not None
        pid = int(frontend.stderr.readline())
        try:
            assert not has_ended(pid)
            frontend.send_signal(signal.SIGKILL)
            frontend.wait(DEADLINE_S)
            wait_until(lambda: has_ended(pid))
        finally:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
