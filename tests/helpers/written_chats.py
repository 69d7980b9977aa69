"""Conversations that a child process has read, as this process reads them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from triptych_services.frontend.requests.raw import RawChat, WrittenMessages, WrittenVariable


def read_written(chat: RawChat) -> RawChat:
    """Return a conversation with objects in the place of JSON."""
    return dataclasses.replace(
        chat,
        messages=_read(chat.messages),
        template_kwargs={name: _read(value) for name, value in chat.template_kwargs.items()},
        documents=tuple(_read(chat.documents)),
    )


def _read(value: Any) -> Any:
    return json.loads(value.json) if isinstance(value, (WrittenMessages, WrittenVariable)) else value
