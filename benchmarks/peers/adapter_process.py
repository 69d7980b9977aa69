"""The driver's end of an adapter: a process per engine and round, every answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.process_tree import Process, descendants, kill_all

CLOSE_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_CENSUS_S = 2.0


class AdapterError(Exception):
    """The engine failed, or did not answer in time; says how."""


class AdapterProcess:
    """One adapter script, in the peer's own Python. Whatever it has started is gone when the block ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start it; what it prints goes to the end of `log`."""
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._seen: set[Process] = set()
        self._closed = threading.Event()
        self._log = log
        self.engine_pids: list[int] = []
        """Roots of the engine's processes, its client left out; as its latest answer says."""
        self.started_s = time.monotonic()
        with log.open("ab") as log_file:
            self._popen = subprocess.Popen(
                command, env=dict(env), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True,
            )  # fmt: skip
        threading.Thread(target=self._read_answers, name="adapter-answers", daemon=True).start()
        self._census = threading.Thread(target=self._keep_census, name="adapter-census", daemon=True)
        self._census.start()

    def __enter__(self) -> AdapterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._census.join()
        self._take_census()
        left = kill_all(self._seen, _KILL_TIMEOUT_S)
        self._popen.wait()
        if left and error is None:
            raise AdapterError(f"processes {[process.pid for process in left]} survive SIGKILL")

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            AdapterError: it failed, died, or has not answered after `timeout_s`.
        """
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last answer tells why
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()
        return self._answer(timeout_s)

    def close(self) -> dict[str, Any]:
        """Let the engine end by itself; its last answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        answer = self._answer(CLOSE_TIMEOUT_S)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # its answer is here: the block's end kills the rest
            self._popen.wait(CLOSE_TIMEOUT_S)
        return answer

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AdapterError(f"no answer after {timeout_s:.0f} s; log: {self._log}") from None
        if line is None:
            raise AdapterError(f"ended with status {self._popen.wait()}; log: {self._log}")
        answer: dict[str, Any] = json.loads(line)
        self._take_census()  # now, before it may end
        if "error" in answer:
            raise AdapterError(answer["error"])
        self.engine_pids = answer.get("pids", [])
        return answer

    def _read_answers(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _keep_census(self) -> None:
        while not self._closed.wait(_CENSUS_S):
            self._take_census()

    def _take_census(self) -> None:
        """Remember who descends from it: an orphan could not be found any more once its parent has died."""
        self._seen.update(descendants([self._popen.pid]))
