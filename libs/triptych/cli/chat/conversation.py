"""The state of a chat: its turns, its system message, how it samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.cli.sampling_flags import SAMPLING_NAMES
from triptych.client.conversation import Message, fill_messages
from triptych.errors import InvalidRequest
from triptych.v1 import chat_pb2

CHAT_FIELDS = tuple(
    name for name in SAMPLING_NAMES if name not in ("n", "logprobs", "prompt_logprobs", "detokenize")
)
"""Sampling fields that make sense here."""


class Conversation:
    """Turns in OpenAI's form. After each question there is an answer, but while one is being waited for."""

    def __init__(self, system: str, sampling: dict[str, Any], *, shows_stats: bool) -> None:
        """
        Args:
            system: The system message; empty: there is none.
            sampling: Fields to send with each turn.
        """
        self.system = system
        self.sampling = sampling
        self.shows_stats = shows_stats
        self._turns: list[Message] = []
        self._before: list[Message] = []
        """The turns before the question that is being answered."""

    @property
    def to_send(self) -> list[Message]:
        """The messages, the system's first."""
        opening: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self._turns

    def ask(self, text: str) -> None:
        """Add a question; an answer is to follow."""
        self._before = list(self._turns)
        self._turns.append({"role": "user", "content": text})

    def ask_again(self) -> None:
        """Forget what follows the last question; another answer is to follow.

        Raises:
            ValueError: There is no question.
        """
        before = list(self._turns)
        self.ask(self.undo())
        self._before = before

    def add_answer(self, message: Message | None) -> None:
        """Add what the assistant said; None takes the question back."""
        if message is None:
            self._turns = self._before
        else:
            self._turns.append(message)

    def clear(self) -> None:
        """Forget all turns, and keep the system message."""
        self._turns.clear()

    def undo(self) -> str:
        """Forget the last question and all after it; returns it.

        Raises:
            ValueError: There is none.
        """
        for place in reversed(range(len(self._turns))):
            if self._turns[place]["role"] == "user":
                question = self._turns[place]["content"]
                del self._turns[place:]
                return str(question)
        raise ValueError("there is no question yet")

    def save(self, file: Path) -> int:
        """Write the messages as JSON; returns their number.

        Raises:
            OSError: The file cannot be written.
        """
        messages = self.to_send
        file.write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return len(messages)

    def load(self, file: Path) -> int:
        """Replace everything by the messages of a file; returns their number.

        Raises:
            OSError, ValueError: The file cannot be read, or is no list of messages; nothing has changed.
        """
        messages = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("expected a JSON list of messages")
        try:
            fill_messages(chat_pb2.Chat(), messages, "messages")
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = messages[0]["content"] if has_system else ""
        if not isinstance(system, str):
            raise ValueError("messages[0].content: expected text")
        self.system, self._turns = system, messages[has_system:]
        return len(messages)
