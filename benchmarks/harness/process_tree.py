"""A process and all that it has started, read from /proc: memory, CPU time, and an end for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


class Process(NamedTuple):
    """Identity of one process: the kernel reuses its number, but not with the same start."""

    pid: int
    started_ticks: int


class _Stat(NamedTuple):
    """Fields of /proc/PID/stat, see proc(5)."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    started_ticks: int


def descendants(roots: Iterable[int]) -> list[Process]:
    """Return the processes of `roots` and all below them that have not ended."""
    stats = _all_stats()
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: dict[int, Process] = {}
    waiting = [pid for pid in roots if pid in stats]
    while waiting:
        pid = waiting.pop()
        found[pid] = Process(pid, stats[pid].started_ticks)
        waiting += children.get(pid, ())
    return list(found.values())


def session_members(session: int) -> list[Process]:
    """Return the processes of a session; they are found even if their parents have ended."""
    return [Process(pid, stat.started_ticks) for pid, stat in _all_stats().items() if stat.session == session]


def peak_resident_bytes(processes: Iterable[Process]) -> int:
    """Return the sum of the largest resident sets (VmHWM); a page that several share counts for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total * 1024


def cpu_seconds(processes: Iterable[Process]) -> float:
    """Return the user and system time that the processes have taken so far."""
    return sum(stat.cpu_ticks for process in processes if (stat := _stat(process.pid))) * _TICK_S


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
    stat = _stat(process.pid)
    return stat is not None and stat.started_ticks == process.started_ticks and stat.state != "Z"


def _all_stats() -> dict[int, _Stat]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid: stat for pid in pids if (stat := _stat(pid))}


def _stat(pid: int) -> _Stat | None:
    """Return None if there is no such process."""
    try:
        # The name is in parentheses and may hold spaces and parentheses itself; fields start at the state.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, parent, _, session, *rest = fields
    return _Stat(state, int(parent), int(session), int(rest[7]) + int(rest[8]), int(rest[15]))
