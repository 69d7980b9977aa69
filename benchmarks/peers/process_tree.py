"""A process and all that it has started, as /proc tells: resident memory, CPU time, an end for all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


class Process(NamedTuple):
    """One process for good: the kernel gives its number to another one day, but not with this start."""

    pid: int
    started_ticks: int


class _Stat(NamedTuple):
    """What is used here of /proc/PID/stat; proc(5)."""

    state: str
    parent: int
    cpu_ticks: int
    started_ticks: int


def descendants(roots: Iterable[int]) -> list[Process]:
    """The processes of `roots` and those below them, less those that have ended."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    stats = {pid: stat for pid in pids if (stat := _stat(pid))}
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


def peak_resident_bytes(processes: Iterable[Process]) -> int:
    """Each process's largest resident set so far (VmHWM), summed; a page that several share counts for each."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue  # ended meanwhile
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total * 1024


def cpu_seconds(processes: Iterable[Process]) -> float:
    """User and system time that they have taken so far."""
    return sum(stat.cpu_ticks for process in processes if (stat := _stat(process.pid))) * _TICK_S


def kill_all(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """SIGKILL those that still run and wait until they are gone; the ones that are not after `timeout_s`.

    The caller reaps its own children: a zombie counts as gone.
    """
    waiting = [process for process in processes if runs(process)]
    for process in waiting:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + timeout_s
    while (waiting := [process for process in waiting if runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return waiting


def runs(process: Process) -> bool:
    """Whether it is there and no zombie."""
    stat = _stat(process.pid)
    return stat is not None and stat.started_ticks == process.started_ticks and stat.state != "Z"


def _stat(pid: int) -> _Stat | None:
    """None where there is no such process."""
    try:
        # The name stands in parentheses and may hold spaces and parentheses itself; fields from the state on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))
