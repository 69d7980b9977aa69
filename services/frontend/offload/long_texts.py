"""Tokenizes long texts in a child process, which has a lower priority than serving.

A text of 1 MB that is all digits has a million tokens, which take a second of CPU time. On a thread of the frontend
that competes with the event loop for a core, and handing the ids to Python holds the interpreter's lock for 30 ms.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from triptych.errors import InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.step import U32
from triptych_services.frontend.offload.limited_process import LimitedProcess, ProcessEnded

LONG_TEXT = 1 << 16
"""Characters from which on a text is tokenized in a child process; so many take 0.1 s at most."""
ENCODE_LIMIT_S = 30.0
"""CPU time that a text may take. The longest body, 10 MiB of digits, takes 15 s."""
_START_LIMIT_S = 15.0
_SCRIPT = Path(__file__).with_name("tokenizer_process.py")


class LongTextEncoder:
    """Owned by the `TextModel`; used by threads. A process starts with the first long text, and one is kept."""

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = ENCODE_LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._limit_s = limit_s
        self._lock = threading.Lock()
        """Guards the process."""
        self._idle: LimitedProcess | None = None
        """The process that is kept while no thread uses it."""

    def encode(self, text: str, path: str, **arguments: Any) -> U32:
        """Return the ids of `Tokenizer.encode`. The array is not writable.

        Args:
            path: Path of the text in the client's words.
            arguments: As of `Tokenizer.encode`.

        Raises:
            InvalidRequest: It takes too long, or too much memory.
        """
        with self._lock:
            process, self._idle = self._idle, None
        was_idle = process is not None
        if process is None or not process.is_alive:
            process = self._start()
        try:
            answer = process.ask({"arguments": arguments}, self._limit_s, text.encode())
        except ProcessEnded as error:
            if was_idle and not error.was_late:  # it may have ended before it saw this text
                return self.encode(text, path, **arguments)
            limit = (
                f"time than the limit of {self._limit_s:g} s" if error.was_late else "memory than there is"
            )
            raise InvalidRequest(
                path, f"{len(text)} characters take more {limit} to tokenize; make it shorter"
            ) from None
        with self._lock:
            self._idle = process  # another that came back before ends here
        return np.frombuffer(answer["data"], np.uint32)

    def _start(self) -> LimitedProcess:
        process = LimitedProcess(_SCRIPT)
        try:
            process.ask({}, _START_LIMIT_S, self._tokenizer.to_json().encode())
        except ProcessEnded:
            raise RuntimeError(f"{_SCRIPT} does not start; its log says why") from None
        return process
