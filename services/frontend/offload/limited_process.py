"""A child process that works on what clients send, under a limit of CPU time, so that it can hang or crash alone.

It answers each line of its input by one line, both JSON objects. Bytes may follow a line, as many as it says: texts and
ids that are long take no time to write as JSON then. A message is limited by the timer that the child sets
on its own CPU time (`ITIMER_PROF`), which ends it: a busy machine makes it slower and refuses nothing.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from triptych.errors import QueueFull
from triptych.observe.metrics import ChildTotals
from triptych_services.frontend.offload.fair_threads import add_cpu_time
from triptych_services.frontend.offload.session_priority import SessionPriority

_CHILD = Path(__file__).with_name("limited_child.py")
_WALL_FACTOR = 12
"""So many times the CPU time may pass by the clock: it is ended then even if it does not compute."""
_PATIENCE_S = 3.0
"""So long, by the clock, a message of a child process is behind others. On a busy machine it might wait for ever."""
_START_LIMIT_S = 15.0
"""CPU time that the start of a process of `KeptProcesses` may take."""
_RETRY_S = 1.0
"""A client is told to ask again after this time, where no process can be started."""
OUTCOMES = ("started", "done", "refused", "late", "crashed")
_totals: dict[str, ChildTotals] = {}  # threads of several owners write it, one set of metrics reads it
_totals_lock = threading.Lock()


class ProcessEnded(Exception):
    """The process ended before it answered."""

    def __init__(self, was_late: bool) -> None:
        """`was_late`: whether it had used up its time; otherwise it crashed, or was killed."""
        self.was_late = was_late


class LimitedProcess:
    """One run of a script of `limited_child.py`. It ends with this object, or with the frontend.

    It takes one message at a time, from any thread.

    The CPU time of the child is charged to the work of `FairThreads` that asks.
    """

    def __init__(self, script: Path) -> None:
        """Start the process.

        Raises:
            QueueFull: The system has no memory, file or process left for it.
        """
        command = [sys.executable, "-P", str(_CHILD), str(script)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            why = f"this frontend cannot start a process for the request: {error.strerror}"
            raise QueueFull(why, _RETRY_S) from error
        self._priority = SessionPriority(self._process.pid)
        self._priority.lower()
        self._work = script.stem.removesuffix("_process")
        self._is_new = True

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is None:  # it could not be started
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "asked for"
            with contextlib.suppress(OSError):  # what it did not read
                pipe.close()
        process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: dict[str, Any], limit_s: float, data: bytes = b"") -> dict[str, Any]:
        """Return the answer to a message. Where bytes belong to it, they are its `data`.

        Args:
            message: JSON; any mapping is an object.
            limit_s: CPU time that the answer may take, in seconds.
            data: Bytes that belong to the message, as its `data` there.

        Raises:
            ProcessEnded: It has used up its time, or crashed. It cannot be used any more.
        """
        process = self._process
        assert process.stdin is not None, "asked for"
        assert process.stdout is not None, "asked for"
        is_late, is_over = threading.Event(), threading.Event()

        def watch() -> None:
            patience_s = min(_PATIENCE_S, limit_s)
            if is_over.wait(patience_s):
                return
            self._priority.restore()
            if is_over.wait(_WALL_FACTOR * limit_s - patience_s):
                self._priority.lower()
            else:
                is_late.set()
                process.kill()

        threading.Thread(target=watch, daemon=True).start()
        head = {**message, "limit_s": limit_s, "num_bytes": len(data)}
        answer: dict[str, Any] | None = None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(head, default=dict).encode() + b"\n")
                process.stdin.write(data)
                process.stdin.flush()
                answer = _read_answer(process.stdout)
        finally:
            is_over.set()
        if answer is None:
            was_late = process.wait() == -signal.SIGPROF or is_late.is_set()
            self._note("late" if was_late else "crashed", limit_s if was_late else 0.0)
            raise ProcessEnded(was_late)
        outcome = "started" if self._is_new else "refused" if "error" in answer else "done"
        self._is_new = False
        self._note(outcome, answer.pop("cpu_s"))
        return answer

    def _note(self, outcome: str, cpu_s: float) -> None:
        add_cpu_time(cpu_s)
        with _totals_lock:
            totals = _totals.setdefault(self._work, ChildTotals(dict.fromkeys(OUTCOMES, 0), 0.0))
            outcomes = {**totals.outcomes, outcome: totals.outcomes[outcome] + 1}
            _totals[self._work] = ChildTotals(outcomes, totals.cpu_s + cpu_s)


class KeptProcesses:
    """Processes of one script that start when they are needed; some are kept while no thread uses them."""

    def __init__(
        self,
        script: Path,
        num_kept: int,
        first: Callable[[], tuple[dict[str, Any], bytes]] = lambda: ({}, b""),
    ) -> None:
        """
        Args:
            num_kept: Processes that are kept while they have nothing to do.
            first: Returns the message that each process is given first, and its bytes.
        """
        self._script = script
        self._num_kept = num_kept
        self._first = first
        self._lock = threading.Lock()
        """Guards the processes."""
        self._idle: list[LimitedProcess] = []

    def ask(self, message: dict[str, Any], limit_s: float, data: bytes = b"") -> dict[str, Any]:
        """Return the answer of a process that no thread uses; see `LimitedProcess.ask`.

        A process that was kept may have ended before it saw the message, so that another one is asked, once.

        Raises:
            ProcessEnded: It has used up its time, or crashed.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.is_alive:
            try:
                return self._ask(process, message, limit_s, data)
            except ProcessEnded as error:
                if error.was_late:
                    raise
        return self._ask(self._start(), message, limit_s, data)

    def _ask(
        self, process: LimitedProcess, message: dict[str, Any], limit_s: float, data: bytes
    ) -> dict[str, Any]:
        answer = process.ask(message, limit_s, data)
        with self._lock:
            if len(self._idle) < self._num_kept:  # otherwise it ends here
                self._idle.append(process)
        return answer

    def _start(self) -> LimitedProcess:
        process = LimitedProcess(self._script)
        message, data = self._first()
        try:
            process.ask(message, _START_LIMIT_S, data)
        except ProcessEnded:
            raise RuntimeError(f"{self._script} does not start; its log says why") from None
        return process


def child_totals() -> dict[str, ChildTotals]:
    """Return what the processes of each script have done since the start, by the script's name without `_process`."""
    with _totals_lock:
        return dict(_totals)


def _read_answer(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read one answer, or return None if the stream ends before it is whole."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    if num_bytes := answer.pop("num_bytes", 0):
        answer["data"] = stream.read(num_bytes)
        if len(answer["data"]) < num_bytes:
            return None
    return answer
