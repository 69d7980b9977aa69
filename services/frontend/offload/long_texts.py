"""Tokenizes long texts in a child process, which has a lower priority than serving.

A text of 1 MB that is all digits has a million tokens, which take a second of CPU time. On a thread of the frontend
that competes with the event loop for a core, and handing the ids to Python holds the interpreter's lock for 30 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from triptych.errors import InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.step import U32
from triptych_services.frontend.offload.limited_process import KeptProcesses, ProcessEnded

LONG_TEXT = 1 << 16
"""Characters from which on a text is tokenized in a child process; so many take 0.1 s at most."""
ENCODE_LIMIT_S = 30.0
"""CPU time that a text may take. The longest body, 10 MiB of digits, takes 15 s."""
_SCRIPT = Path(__file__).with_name("tokenizer_process.py")


class LongTextEncoder:
    """Owned by the `TextModel`; used by threads. A process starts with the first long text, and one is kept."""

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = ENCODE_LIMIT_S) -> None:
        self._limit_s = limit_s
        data = tokenizer.to_json().encode()  # holds the interpreter's lock, so not when a process starts
        self._processes = KeptProcesses(_SCRIPT, 1, lambda: ({}, data))

    def encode(self, text: str, path: str, **arguments: Any) -> U32:
        """Return the ids of `Tokenizer.encode`. The array is not writable.

        Args:
            path: Path of the text in the client's words.
            arguments: As of `Tokenizer.encode`.

        Raises:
            InvalidRequest: It takes too long, or too much memory.
        """
        try:
            answer = self._processes.ask({"arguments": arguments}, self._limit_s, text.encode())
        except ProcessEnded as error:
            limit = (
                f"time than the limit of {self._limit_s:g} s" if error.was_late else "memory than there is"
            )
            raise InvalidRequest(
                path, f"{len(text)} characters take more {limit} to tokenize; make it shorter"
            ) from None
        return np.frombuffer(answer.get("data", b""), np.uint32)  # it may have no tokens
