"""Conversations that APIs send in other pieces than chat templates read: items and blocks become turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triptych.errors import FieldViolation
from triptych_services.frontend.requests.sampling import why_not_text
from triptych_services.frontend.requests.tools import to_call


class Turns:
    """A conversation that grows piece by piece. Pieces of the assistant that follow one another are one turn."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._content = _Text()
        """The content of the last turn."""
        self._reasoning = _Text()
        """The reasoning of the last turn."""
        self.violations: list[FieldViolation] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns so far, as in a `RawChat`."""
        self._write_texts()
        return self._messages

    def add(self, role: str, text: str, path: str) -> None:
        """Add a turn. System turns at the beginning become one: many templates take no other.

        Args:
            path: Of the text in the body, here and below.
        """
        if not self._check(text, path):
            return
        if role == "assistant":
            self._begin_assistant()
            self._content.add(text, "\n")
        elif role == "system" and len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._content.add(text, "\n\n")
        else:
            self._begin({"role": role}, text)

    def add_reasoning(self, text: str, path: str) -> None:
        """Add what the assistant thought."""
        if text and self._check(text, path):
            self._begin_assistant()
            self._reasoning.add(text, "\n")

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any], path: str) -> None:
        """Add a call that the assistant made.

        Args:
            arguments: As text or decoded.
        """
        texts = [call_id, name, *([arguments] if isinstance(arguments, str) else [])]
        if all(self._check(text, path) for text in texts):
            turn = self._begin_assistant()
            turn.setdefault("tool_calls", []).append(to_call(call_id, name, arguments))

    def add_result(self, call_id: str, text: str, path: str) -> None:
        """Add what a call has returned."""
        if self._check(call_id, path) and self._check(text, path):
            self._begin({"role": "tool", "tool_call_id": call_id}, text)

    def _begin_assistant(self) -> dict[str, Any]:
        """Return the turn of the assistant that goes on, or a new one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._begin({"role": "assistant"})
        return self._messages[-1]

    def _begin(self, turn: dict[str, Any], *pieces: str) -> None:
        self._write_texts()
        self._content, self._reasoning = _Text(pieces), _Text()
        self._messages.append(turn)

    def _write_texts(self) -> None:
        """Write the texts of the last turn into it."""
        if self._messages:
            turn = self._messages[-1]
            # thoughts that were cut before the answer are a turn, too
            turn["content"] = self._content.joined or (None if "tool_calls" in turn else "")
            if self._reasoning.joined:
                turn["reasoning_content"] = self._reasoning.joined

    def _check(self, text: str, path: str) -> bool:
        why = why_not_text(text)
        if why is not None:
            self.violations.append(FieldViolation(path, why))
        return why is None


class _Text:
    """A text that grows piece by piece, each behind a separator unless nothing is before it.

    It is joined once: hundreds of thousands of pieces would be copied for each that comes.
    """

    def __init__(self, pieces: Iterable[str] = ()) -> None:
        self._pieces = list(pieces)

    def add(self, text: str, separator: str) -> None:
        if any(self._pieces[:1]):
            self._pieces.append(separator)
        else:
            self._pieces.clear()
        self._pieces.append(text)

    @property
    def joined(self) -> str | None:
        """The text, or None without any piece."""
        return "".join(self._pieces) if self._pieces else None
