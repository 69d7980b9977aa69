"""Reads long requests in a process of its own: JSON or protobuf, checks, and what an API makes of it.

`limited_child.py` runs it for `LongReader`. The messages and their answers:

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
from array import array
from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any

from triptych.errors import TriptychError
from triptych_services.frontend.requests.parse import write_messages
from triptych_services.frontend.requests.raw import RawChat, WrittenMessages

# Of 10 MiB of small objects, 1.2 GiB of address space were used.
_MAX_BYTES = 2 << 30
_MAX_ANSWER_BYTES = 128 << 20
"""16 MiB of control characters are 96 MiB of JSON, and as many bytes of empty calls of tools are 600."""


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
    """Writes the messages of a conversation as JSON, so that reading them makes no objects.

    Repeated fields and maps of protobuf messages, which cannot be pickled, become lists and dicts.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MutableSequence) and not isinstance(value, array):
            return list, (list(value),)
        if isinstance(value, MutableMapping):
            return dict, (dict(value),)
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
    if data.tell() > _MAX_ANSWER_BYTES:
        raise MemoryError
    return data.getbuffer()
