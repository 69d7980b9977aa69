"""Reads long bodies in a process of its own: JSON, checks, and what a route makes of it.

`limited_child.py` runs it for `BodyReader`. The messages and their answers:

    {}                                                  {}                                     first, once
    {"data": a pickled function without arguments}      {"data": what it returns, pickled} or
                                                        {"error": name, "data": what it raises, pickled}

Conversations come back with `WrittenMessages`.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import resource
import traceback
from collections.abc import Callable
from typing import Any

import triptych_services.frontend.http.generation  # noqa: F401 - what every body needs is loaded at the start
from triptych.errors import TriptychError
from triptych_services.frontend.requests.parse import write_messages
from triptych_services.frontend.requests.raw import RawChat, WrittenMessages

# Of 10 MiB of small objects, 1.2 GiB of address space were used.
_MAX_BYTES = 2 << 30


def begin(message: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Limit the memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    return {}, _answer


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"data": _pickled(pickle.loads(message["data"])())}
    except Exception as error:
        if not isinstance(error, TriptychError):  # a bug: the frontend logs it
            error.add_note("".join(traceback.format_exception(error)))
        return {"error": type(error).__name__, "data": pickle.dumps(error)}


class _Pickler(pickle.Pickler):
    """Writes the messages of a conversation as JSON, so that reading them makes no objects."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not RawChat:
            return NotImplemented
        messages = value.messages
        if not isinstance(messages, WrittenMessages):
            messages = write_messages(messages)
        chat = dataclasses.replace(value, messages=messages)
        names = [field.name for field in dataclasses.fields(chat) if field.init]
        return RawChat, tuple(getattr(chat, name) for name in names)


def _pickled(value: Any) -> memoryview:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getbuffer()
