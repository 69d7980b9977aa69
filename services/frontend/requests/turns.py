"""Conversations that APIs send in other pieces than chat templates read: items and blocks become turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.frontend.requests.sampling import why_not_text
from services.frontend.requests.tools import to_call
from triptych.errors import FieldViolation


class Turns:
    """A conversation that grows piece by piece. Pieces of the assistant that follow one another are one turn."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """The turns so far, as in a `RawChat`."""
        self.violations: list[FieldViolation] = []

    def add(self, role: str, text: str, path: str) -> None:
        """Add a turn. System turns at the beginning become one: many templates take no other.

        Args:
            path: Of the text in the body, here and below.
        """
        if not self._check(text, path):
            return
        if role == "assistant":
            turn = self._assistant
            turn["content"] = _join(turn["content"], text, "\n")
        elif role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] = _join(self.messages[0]["content"], text, "\n\n")
        else:
            self.messages.append({"role": role, "content": text})

    def add_reasoning(self, text: str, path: str) -> None:
        """Add what the assistant thought."""
        if text and self._check(text, path):
            turn = self._assistant
            turn["reasoning_content"] = _join(turn.get("reasoning_content"), text, "\n")

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any], path: str) -> None:
        """Add a call that the assistant made.

        Args:
            arguments: As text or decoded.
        """
        texts = [call_id, name, *([arguments] if isinstance(arguments, str) else [])]
        if all(self._check(text, path) for text in texts):
            self._assistant.setdefault("tool_calls", []).append(to_call(call_id, name, arguments))

    def add_result(self, call_id: str, text: str, path: str) -> None:
        """Add what a call has returned."""
        if self._check(call_id, path) and self._check(text, path):
            self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    @property
    def _assistant(self) -> dict[str, Any]:
        """The turn of the assistant that goes on, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]

    def _check(self, text: str, path: str) -> bool:
        why = why_not_text(text)
        if why is not None:
            self.violations.append(FieldViolation(path, why))
        return why is None


def _join(before: str | None, text: str, separator: str) -> str:
    return f"{before}{separator}{text}" if before else text
