"""Child processes that answer in JSON lines, each answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.command import ROOT
from benchmarks.harness.process_tree import Process, descendants, kill_all, session_members

_KILL_TIMEOUT_S = 10.0


class ChildError(Exception):
    """The child failed, ended, or did not answer in time; the message says how."""


class Child:
    """A process that writes JSON lines to its stdout. All that it has started ends with the block."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Start it at the repository's root.

        Args:
            env: Environment; None for ours.
            log: File to which its stderr is appended; None for our stderr.
        """
        self.started_s = time.monotonic()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._seen: set[Process] = set()
        self._log = log
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(log.open("ab")) if log else None
            self._popen = subprocess.Popen(
                command, env=env, cwd=ROOT, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        threading.Thread(target=self._read_lines, name="child-lines", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id: all that it has started is below it."""
        return self._popen.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._look_around()
        survivors = kill_all(self._seen.union(session_members(self._popen.pid)), _KILL_TIMEOUT_S)
        self._popen.wait()
        if survivors and error is None:
            raise ChildError(f"processes {[process.pid for process in survivors]} survive SIGKILL")

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return the answer.

        Raises:
            ChildError: See `receive`.
        """
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last answer says why
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()
        return self.receive(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Close its stdin, which asks it to end, and wait for its last answer and its end.

        Raises:
            ChildError: See `receive`.
        """
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self.receive(timeout_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line.

        Raises:
            ChildError: It said `error`, ended, or wrote nothing for `timeout_s`.
        """
        where = f"; log: {self._log}" if self._log else ""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise ChildError(f"no answer after {timeout_s:.0f} s{where}") from None
        if line is None:
            raise ChildError(f"ended with status {self._popen.wait()}{where}")
        self._look_around()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer and len(answer) == 1:
            raise ChildError(answer["error"])
        return answer

    def _read_lines(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _look_around(self) -> None:
        """Remember what it has started: an orphan with a session of its own could not be found later."""
        self._seen.update(descendants([self._popen.pid]))


class Answers:
    """The child's side: JSON lines on the stdout that the process was started with.

    What anything else prints to stdout goes to stderr.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")  # not inherited: no grandchild holds it open
        os.dup2(2, 1)

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
