"""The `triptych` command, run in this process or on a terminal of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from triptych.cli import main

NOBODY = "127.0.0.1:1"
"""An address where nobody answers."""
DEADLINE_S = 120.0


def exit_code(*words: str) -> int:
    """As the shell sees it; argparse leaves by SystemExit."""
    try:
        return main(words)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


class Terminal:
    """A command whose standard streams are a terminal that we hold the other end of."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._descriptor, other = os.openpty()
        take_terminal = "import os, sys; os.login_tty(0); os.execv(sys.executable, sys.argv[1:])"
        command = [sys.executable, "-m", "triptych.cli", *words]
        self._process = subprocess.Popen(
            [sys.executable, "-c", take_terminal, *command], stdin=other, env={**os.environ, **environment}
        )
        os.close(other)
        self.shown = ""
        """All that it has written so far, with its escape sequences."""

    def type(self, keys: str) -> None:
        """Send keys: a carriage return is Enter, chr(3) is Ctrl-C."""
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Read until it has shown the text so many times."""
        deadline = time.monotonic() + DEADLINE_S
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            assert self._read(), f"it ended without {text!r}: {self.shown!r}"

    def wait_for_prompt(self, number: int) -> None:
        """Read until it waits for keys the first time (1), the second time (2), …"""
        self.wait_for("\x1b[?2004h", times=number)  # it wants to know where a pasted text ends

    def wait_for_end(self) -> int:
        """Read to its end; returns its exit code."""
        while self._read():
            pass
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._descriptor)

    def _read(self) -> bool:
        """Read what there is, at most after the deadline; False at the end."""
        assert select.select([self._descriptor], [], [], DEADLINE_S)[0], f"it is silent after {self.shown!r}"
        try:
            piece = os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # all other ends are closed
        self.shown += piece
        if "\x1b[6n" in piece:  # it asks where the cursor is
            self.type("\x1b[1;1R")
        return bool(piece)


@contextlib.contextmanager
def on_terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    """Run `triptych` on a terminal."""
    terminal = Terminal(words, {"TERM": "xterm", **environment})
    try:
        yield terminal
    finally:
        terminal.close()
