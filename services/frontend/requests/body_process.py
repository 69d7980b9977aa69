"""Reads long requests in a process of its own: JSON or protobuf, checks, and what an API makes of it.

`limited_child.py` runs it for `LongReader`. The messages and their answers:

    {}                                                  {}                                     first, once
    {"data": a pickled function without arguments}      {"data": what it returns, pickled} or
                                                        {"error": name, "data": what it raises, pickled}

Conversations come back with `WrittenMessages`, and with each `WrittenVariable` of their templates.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import resource
import traceback
from array import array
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from triptych.errors import FieldViolation, InvalidRequest, TriptychError
from triptych_services.frontend.requests.parse import write_messages, write_variable
from triptych_services.frontend.requests.raw import RawChat, RawRequest, WrittenMessages

# Of 10 MiB of small objects, 1.2 GiB of address space were used.
_MAX_BYTES = 2 << 30
_MAX_ANSWER_BYTES = 128 << 20
"""16 MiB of control characters are 96 MiB of JSON, and as many bytes of empty calls of tools are 600."""
_MAX_ENTRIES = 1 << 18
"""A list has no more entries: the frontend makes an object of each, while it does nothing else."""
_MAX_VALUES = 1 << 16
"""Template variables and values of tools of all conversations of a call: the frontend makes objects of them, and writes
those of tools as JSON again. So many take 20 ms."""


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
    """Writes what only the template of a conversation reads as JSON, so that no objects are made of it.

    Repeated fields and maps of protobuf messages, which cannot be pickled, become arrays, lists and dicts.
    """

    num_values = 0
    """Template variables and values of tools of all conversations so far."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MutableSequence) and not isinstance(value, array):
            entries = list(value)
            if entries and isinstance(entries[0], int):
                return array, ("I", array("I", entries).tobytes())
            return list, (entries,)
        if isinstance(value, MutableMapping):
            return dict, (dict(value),)
        if type(value) is RawRequest:
            _check_lists(value)
        if type(value) is not RawChat:
            return NotImplemented
        self._count_values(value)
        messages = value.messages
        if not isinstance(messages, WrittenMessages):
            messages = write_messages(messages)
        variables = {name: write_variable(each) for name, each in value.template_kwargs.items()}
        documents = write_variable(value.documents) if value.documents else ()
        chat = dataclasses.replace(value, messages=messages, template_kwargs=variables, documents=documents)
        names = [field.name for field in dataclasses.fields(chat) if field.init]
        return RawChat, tuple(getattr(chat, name) for name in names)

    def _count_values(self, chat: RawChat) -> None:
        self.num_values += len(chat.template_kwargs)
        left: list[Any] = [*chat.tools]
        while left:
            value = left.pop()
            self.num_values += 1
            if isinstance(value, Mapping):
                left += value.values()
            elif isinstance(value, list):
                left += value
        if self.num_values > _MAX_VALUES:
            what = "template variables and values of tools"
            why = f"{self.num_values} {what} together are above the limit {_MAX_VALUES}"
            raise InvalidRequest("", why)


def _pickled(value: Any) -> memoryview:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    if data.tell() > _MAX_ANSWER_BYTES:
        raise MemoryError
    return data.getbuffer()


def _check_lists(raw: RawRequest) -> None:
    counts = {
        name: len(value)
        for name, value in raw.sampling.items()
        if isinstance(value, Sequence | Mapping) and not isinstance(value, str)
    }
    if (form := raw.sampling.get("structured_outputs")) is not None and form.choice is not None:
        counts["structured_outputs"] = len(form.choice)
    violations = [
        FieldViolation(
            raw.path(name),
            f"{count} entries are above the limit {_MAX_ENTRIES}",
            str(count),
            str(_MAX_ENTRIES),
        )
        for name, count in counts.items()
        if count > _MAX_ENTRIES
    ]
    if violations:
        raise InvalidRequest(violations)
