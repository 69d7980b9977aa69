"""Prompts in all their forms, each told to be one prompt or many."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeAlias, cast

from triptych.client.conversation import Conversation, fill_messages
from triptych.errors import FieldViolation, InvalidRequest
from triptych.v1 import chat_pb2

Prompt: TypeAlias = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation for the model's chat template."""


PromptDict: TypeAlias = Mapping[str, Any]
"""A prompt in vLLM's form. It has `prompt` (a text) or `prompt_token_ids`, which count if it has both, and perhaps a
`cache_salt`."""


class SupportsArray(Protocol):
    """An array or tensor in the host's memory: numpy's, torch's, …"""

    def __array__(self) -> Any: ...


AnyPrompt: TypeAlias = Prompt | PromptDict | SupportsArray
"""One prompt: text, token ids (a list, a tuple, a 1-D array), a conversation, or a dictionary."""
AnyPrompts: TypeAlias = AnyPrompt | Iterable[AnyPrompt]
"""One prompt or many: a list, a 2-D array of token ids, or an iterator."""

_MAX_VIOLATIONS = 10  # prompts that one error names
_DICT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
_EXPECTED = (
    "expected text, a list of token ids, a list of messages, or a dictionary with prompt or prompt_token_ids"
)

# Wrong values are shown in errors by their beginning: a list of thousands of prompts must not print itself.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
show = _SHORT.repr
"""Return a value as an error shows it."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt in a form that has been checked."""

    content: Prompt
    text: str | None = None
    """The text that the output has as `prompt`. None where it is not known."""
    cache_salt: str | None = None
    """Its own cache salt. None means that of the call."""


def parse_prompts(prompts: AnyPrompts) -> list[ParsedPrompt]:
    """Return one prompt or many as a list; each checked for its form.

    A text, a list of integers, a list of messages, a dictionary and a 1-D array are one prompt; a list, tuple, iterator
    or 2-D array of such is many.

    Raises:
        InvalidRequest: Items are none of these; names the first ten.
    """
    given = _listed(prompts)
    if isinstance(given, str | Mapping):
        return [parse_prompt(cast(AnyPrompt, given))]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidRequest("prompts", f"{_EXPECTED}, or a list of these, not {show(prompts)}")
    if given and (isinstance(given[0], Integral) or _is_message(given[0])):
        return [parse_prompt(cast(AnyPrompt, given))]
    return _parse_each(given, "prompts", parse_prompt)


def parse_conversations(messages: Conversation | Iterable[Conversation]) -> list[ParsedPrompt]:
    """Return one conversation or many as a list.

    Raises:
        InvalidRequest: Items are no conversations; names the first ten.
    """
    given = _listed(messages)
    if isinstance(given, Sequence) and given and isinstance(given[0], Mapping):
        return [_parse_conversation(given, "messages")]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidRequest(
            "messages", f"expected a list of messages or a list of such, not {show(messages)}"
        )
    return _parse_each(given, "messages", _parse_conversation)


def parse_prompt(prompt: AnyPrompt, where: str = "prompt") -> ParsedPrompt:
    """Return one prompt, its form checked.

    Args:
        where: Its name in errors.

    Raises:
        InvalidRequest: It is none; says why.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, prompt)
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt, where)
    given = _listed(prompt)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if given and all(isinstance(item, Mapping) for item in given):
            fill_messages(chat_pb2.Chat(), given, f"{where}.messages")  # checks them
            return ParsedPrompt(given)
        if _are_token_ids(given):
            return ParsedPrompt(given)
    raise InvalidRequest(where, f"{_EXPECTED}, not {show(prompt)}")


def is_token_ids(prompt: Prompt) -> bool:
    """Return whether a checked prompt is a list of token ids."""
    return not isinstance(prompt, str) and not is_conversation(prompt)


def is_conversation(prompt: Prompt) -> bool:
    """Return whether a checked prompt is a list of messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _parse_each(items: Sequence[Any], name: str, parse: Any) -> list[ParsedPrompt]:
    parsed: list[ParsedPrompt] = []
    violations: list[FieldViolation] = []
    for number, item in enumerate(items):
        try:
            parsed.append(parse(item, f"{name}[{number}]"))
        except InvalidRequest as error:
            violations += error.violations
            if len(violations) >= _MAX_VIOLATIONS:
                break
    if violations:
        raise InvalidRequest(violations)
    return parsed


def _parse_dict(prompt: Mapping[str, Any], where: str) -> ParsedPrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := sorted(map(str, given.keys() - _DICT_KEYS)):
        raise InvalidRequest(
            f"{where}.{unknown[0]}", f"not served; a prompt has {', '.join(sorted(_DICT_KEYS))}"
        )
    text, salt = given.get("prompt"), given.get("cache_salt")
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{where}.{key}", f"expected text, not {show(value)}")
    if "prompt_token_ids" in given:
        token_ids = _listed(given["prompt_token_ids"])
        if isinstance(token_ids, str) or not isinstance(token_ids, Sequence) or not _are_token_ids(token_ids):
            shown = show(given["prompt_token_ids"])
            raise InvalidRequest(f"{where}.prompt_token_ids", f"expected a list of token ids, not {shown}")
        return ParsedPrompt(token_ids, text, salt)
    if text is None:
        raise InvalidRequest(where, "has neither prompt nor prompt_token_ids")
    return ParsedPrompt(text, text, salt)


def _parse_conversation(messages: Any, where: str) -> ParsedPrompt:
    given = _listed(messages)
    if not isinstance(given, Sequence) or not given or not all(isinstance(item, Mapping) for item in given):
        raise InvalidRequest(where, f"expected a list of messages, not {show(messages)}")
    return parse_prompt(given, where)


def _listed(value: Any) -> Any:
    """Return arrays and iterators as lists, anything else as it is."""
    if isinstance(value, str | bytes | Mapping | list | tuple):
        return value
    if hasattr(value, "__array__"):
        import numpy as np

        return np.asarray(value).tolist()
    if isinstance(value, Iterable) and not isinstance(value, Sequence):
        return list(value)
    return value


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and not (item.keys() & {"prompt", "prompt_token_ids"})


def _are_token_ids(items: Sequence[Any]) -> bool:
    types = set(map(type, items))  # one pass in C: prompts are long
    return types <= {int} or (bool not in types and all(issubclass(kind, Integral) for kind in types))
