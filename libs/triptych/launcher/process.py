"""One service as a child process: its ports, its last words, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

from triptych.config.loader import CONFIG_FILE_ENV, iter_options
from triptych.config.orchestrator import LWS_VARIABLES
from triptych.hub.cache import cache_home

TAIL_LINES = 50
_JOIN_S = 1.0  # a grandchild may hold the pipe open; its lines are not waited for longer
USAGE_EXIT_CODE = 2
"""A service that cannot use its config or bind its ports exits with this and says why in one line."""
MAX_RESTARTS = 5
RESTART_PERIOD_S = 60.0
"""A service that dies more than MAX_RESTARTS times within this time takes the others down."""
# doubles with each death within the period but the first: 0, 0.2 ... 1.6 s, 3 s in all
_FIRST_BACKOFF_S = 0.2
_FORBIDDEN, _PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
_CHECKED_BY_HASH = 1  # flag of a .pyc file, see PEP 552


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    code: int
    """Negative: the signal that killed it."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


class Deaths:
    """The latest ends of a process that is to run on: when it is started again, and when no more."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def note(self, now: float) -> float | None:
        """Note an end at a time in seconds. Return the pause before the next start; None: there are too many."""
        times = self._times
        times.append(now)
        while times[0] < now - RESTART_PERIOD_S:
            times.popleft()
        if len(times) > MAX_RESTARTS:
            return None
        return 0.0 if len(times) == 1 else _FIRST_BACKOFF_S * 2 ** (len(times) - 2)

    @property
    def why_too_many(self) -> str:
        return f"it died {len(self._times)} times within {RESTART_PERIOD_S:g} s"

    def describe(self, backoff_s: float) -> str:
        """Say when it is started again."""
        when = f"in {backoff_s:.1f} s" if backoff_s else "at once"
        return (
            f"starting it again {when} ({len(self._times)} of {MAX_RESTARTS} within {RESTART_PERIOD_S:g} s)"
        )


class ServiceProcess:
    """A child in a session of its own, so that Ctrl-C reaches only its parent, which stops it in order.

    Owned by the thread that created it; the child dies with that thread. `tail` may be read by others.
    """

    def __init__(self, module: str, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        """Start to import the module, which runs once `begin` is called."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines on stdout and stderr, for saying why it died."""
        self._on_line = on_line
        self._directory = tempfile.TemporaryDirectory(prefix="triptych-")
        ready_file = Path(self._directory.name) / "ready.json"
        self._ready_file: Path | None = ready_file
        self._popen = subprocess.Popen(
            # -P: a directory called `triptych_services` in the user's working directory is not ours
            [sys.executable, "-P", "-m", "triptych.launcher.child", str(os.getpid()), module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=env, start_new_session=True,
        )  # fmt: skip
        self.pid = self._popen.pid
        self.sentinel: int | None = None
        """A descriptor that becomes readable when it ends, until `poll` has told its end; None on macOS, and where a
        sandbox or an old kernel has none."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.sentinel = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._read_lines, name=f"log-{module}", daemon=True)
        self._reader.start()

    @property
    def has_begun(self) -> bool:
        """Whether it has its flags."""
        assert self._popen.stdin is not None
        return self._popen.stdin.closed

    def begin(self, flags: Sequence[str]) -> None:
        """Let the module run with these flags. Called once."""
        stdin = self._popen.stdin
        assert stdin is not None
        # a pipe holds more than the flags, so a child that imports does not keep us; one that has died is polled
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(json.dumps([*flags, f"--ready-file={self._ready_file}"]).encode())

    def read_ports(self) -> dict[str, int] | None:
        """Return the ports from its ready file (port, metrics_port, …), or None if it has not bound yet.

        Deletes the file and its directory once read.
        """
        if self._ready_file is None or not self._ready_file.exists():
            return None
        ports = json.loads(self._ready_file.read_text())
        self._drop_ready_file()
        return {name: int(port) for name, port in ports.items() if name.endswith("port")}

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs. What it left running in its session ends with it."""
        if self._popen.returncode is None:
            # Not reaped yet: its pid still names the group, so no stranger can be hit.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            if self.sentinel is not None:
                os.close(self.sentinel)
                self.sentinel = None
            self._reader.join(_JOIN_S)
            self._drop_ready_file()
        return Exit(self._popen.returncode)

    def terminate(self) -> None:
        """Ask it to drain and leave."""
        if self._popen.returncode is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and all that it started; `poll` reports its end."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _drop_ready_file(self) -> None:
        self._ready_file = None
        self._directory.cleanup()

    def _read_lines(self) -> None:
        stdout = self._popen.stdout
        assert stdout is not None
        with stdout:
            for raw in stdout:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self.tail.append(line)
                self._on_line(line)


def child_environment() -> dict[str, str]:
    """Return our environment without options: flags carry them, and those left at their default must stay so."""
    dropped = {option.env for option in iter_options()} | {CONFIG_FILE_ENV, *LWS_VARIABLES}
    kept = {name: text for name, text in os.environ.items() if name not in dropped}
    # A crash in native code then leaves a stack among the last lines, and nothing is held back in a buffer.
    return with_bytecode_cache({"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **kept})


def with_bytecode_cache(env: Mapping[str, str], source: Path = Path(__file__)) -> dict[str, str]:
    """Return an environment in which modules are compiled once, and not at each start.

    Where Python may not write beside the sources, and nothing was compiled there when they were installed, three
    processes compile the project's modules: 1.3 s of CPU time. They then share a directory in the project's cache. A
    directory that is set stays.

    Args:
        source: A module of the project, for which the others speak.
    """
    is_writable = not env.get(_FORBIDDEN) and os.access(source.parent, os.W_OK)
    if env.get(_PREFIX) or is_writable or _is_compiled(source):
        return dict(env)
    directory = cache_home() / "bytecode"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # nothing is lost but time
        return dict(env)
    kept = {name: text for name, text in env.items() if name != _FORBIDDEN}
    return {**kept, _PREFIX: str(directory)}


def _is_compiled(source: Path) -> bool:
    """Return whether a .pyc file of this version of Python lies beside a source and belongs to it."""
    try:
        with Path(cache_from_source(str(source))).open("rb") as file:
            header = file.read(16)
        stat = source.stat()
    except OSError:
        return False
    if header[:4] != MAGIC_NUMBER:
        return False
    numbers = [int.from_bytes(header[start : start + 4], "little") for start in (4, 8, 12)]
    of_source = [int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF]
    return bool(numbers[0] & _CHECKED_BY_HASH) or numbers[1:] == of_source
