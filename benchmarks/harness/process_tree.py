"""A process and all that it has started, read from /proc: memory, CPU time, and an end for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/PID/stat showed it, see proc(5)."""

    pid: int
    started_ticks: int
    """Together with `pid` its identity: the kernel reuses numbers, but not with the same start."""
    state: str = field(compare=False)
    parent: int = field(compare=False)
    session: int = field(compare=False)
    cpu_ticks: int = field(compare=False)


def descendants(roots: Iterable[int]) -> list[Process]:
    """Return the processes of `roots` and all below them that have not ended."""
    processes = _all_processes()
    known = {process.pid: process for process in processes}
    found = {pid: known[pid] for pid in roots if pid in known}
    num_before = -1
    while len(found) > num_before:
        num_before = len(found)
        found |= {process.pid: process for process in processes if process.parent in found}
    return list(found.values())


def session_members(session: int) -> list[Process]:
    """Return the processes of a session; they are found even if their parents have ended."""
    return [process for process in _all_processes() if process.session == session]


def peak_resident_bytes(processes: Iterable[Process]) -> int:
    """Return the sum of the largest resident sets (VmHWM); a page that several share counts for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total * 1024


def resident_bytes(pid: int) -> int:
    """Return the resident set of one process, pages that it shares with others included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(processes: Iterable[Process]) -> float:
    """Return the user and system time so far of the processes, and of children that they have waited for."""
    return sum(now.cpu_ticks for process in processes if (now := _process(process.pid))) * _TICK_S


def kill_all(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Send SIGKILL and wait; return the processes that still run after `timeout_s`.

    The caller reaps its own children: a zombie counts as gone.
    """
    waiting = [process for process in processes if runs(process)]
    for process in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while (waiting := [process for process in waiting if runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return waiting


def runs(process: Process) -> bool:
    """Return whether the process is there and no zombie."""
    now = _process(process.pid)
    return now is not None and now == process and now.state != "Z"


def _all_processes() -> list[Process]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [process for pid in pids if (process := _process(pid))]


def _process(pid: int) -> Process | None:
    """Return None if there is no such process."""
    try:
        # The name is in parentheses and may hold spaces and parentheses itself; fields start at the state.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    cpu_ticks = sum(map(int, fields[11:15]))  # of its own in user and system mode, and of ended children
    return Process(pid, int(fields[19]), fields[0], int(fields[1]), int(fields[3]), cpu_ticks)
