"""Runs the measuring process, and another one for the rest when it dies or hangs. Needs no torch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu_figures.report import Report

ROW_TIMEOUT_S = 150.0  # a model of 47 GB is drawn and its kernels compiled within a fraction of that
START_TIMEOUT_S = 120.0  # imports, and a CUDA context
GRACE_S = 60.0  # that a row may run past the budget


def supervise(
    command: Sequence[str],
    report: Report,
    *,
    budget_s: float,
    row_timeout_s: float = ROW_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    environment: dict[str, str] | None = None,
) -> None:
    """Report an outcome of every row, whatever becomes of the processes that measure them.

    Args:
        command: of the measuring process; it is given `--events-fd`, `--first` and `--budget-s`.
        budget_s: after as many seconds no further row is begun, and `GRACE_S` later the last one is ended.
    Raises:
        RuntimeError: no process came as far as naming the rows.
    """
    deadline = time.monotonic() + budget_s
    first, is_done = 0, False
    while not is_done:
        run = _Run(command, first, deadline, environment)
        why = run.follow(report, row_timeout_s, start_timeout_s)
        if not report.titles:
            raise RuntimeError(f"the measuring process named no figure: {why}")
        if run.begun is not None or run.num_outcomes == 0:
            # a process that dies between two rows has no row to blame, unless it does nothing else
            culprit = len(report.index_to_outcome) if run.begun is None else run.begun
            if culprit < len(report.titles):
                report.add(culprit, {"error": f"the measuring process was lost: {why}"})
        first = len(report.index_to_outcome)  # rows are measured in their order
        is_done = first >= len(report.titles)


class _Run:
    """One measuring process."""

    def __init__(
        self, command: Sequence[str], first: int, deadline: float, environment: dict[str, str] | None
    ) -> None:
        self.begun: int | None = None
        """The row without an outcome yet."""
        self.num_outcomes = 0
        self._deadline = deadline
        self._events, child_end = os.pipe()
        budget_s = max(deadline - time.monotonic(), 0.0)
        options = ["--events-fd", str(child_end), "--first", str(first), "--budget-s", f"{budget_s:.3f}"]
        self._process = subprocess.Popen(
            [*command, *options], pass_fds=(child_end,), env=environment, start_new_session=True
        )
        os.close(child_end)

    def follow(self, report: Report, row_timeout_s: float, start_timeout_s: float) -> str:
        """Hand its events to the report until it ends; why it did."""

        def timeout_s() -> float:
            left = self._deadline + GRACE_S - time.monotonic()
            return start_timeout_s if self.begun is None else max(min(row_timeout_s, left), 0.0)

        try:
            for event in self._read(timeout_s):
                self._handle(event, report)
        except TimeoutError as error:
            self._kill()
            return f"nothing was heard of it for {error.args[0]:.0f} s"
        except BaseException:
            self._kill()
            raise
        self._process.wait()
        return f"it ended with {self._process.returncode}"

    def _handle(self, event: dict[str, Any], report: Report) -> None:
        kind, index = event.pop("event"), event.pop("index", None)
        if kind == "machine":
            report.begin(event)
        elif kind == "rows":
            report.titles = event["titles"]
        elif kind == "started":
            self.begun = index
        else:
            report.add(index, {"skipped": "the time budget is spent"} if kind == "skipped" else event)
            self.begun = None
            self.num_outcomes += 1

    def _read(self, timeout_s: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """Its events until it closes the pipe. Raises TimeoutError after `timeout_s()` seconds of silence."""
        pending = b""
        with selectors.DefaultSelector() as selector, open(self._events, "rb", closefd=True):
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                limit_s = timeout_s()
                if not selector.select(limit_s):
                    raise TimeoutError(limit_s)
                chunk = os.read(self._events, 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                yield from map(json.loads, lines)

    def _kill(self) -> None:
        """End it and what it started, which has a session of its own."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
