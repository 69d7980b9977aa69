"""Tools that a conversation offers to the model: their checks, calls in its messages, how answers are split."""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import FieldViolation
from triptych.text.answer_parser import AnswerParser, ReasoningFormat, ToolCallFormat
from triptych_services.frontend.requests.json_text import read_json

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts of reasoning that chat templates do not know -> the nearest that they do."""
_SHORT_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerSplit:
    """How the answer to a conversation is split into its parts."""

    reasoning: ReasoningFormat | None
    is_reasoning: bool
    """The prompt has opened the reasoning."""
    tool_format: ToolCallFormat | None
    tools: Mapping[str, Mapping[str, Any]]
    """Name of each tool -> JSON schema of its parameters."""
    max_calls: int | None
    """Calls after so many are left out; None if all are sent."""
    sends_reasoning: bool
    names_tool: bool = False
    """The request named the tool: calling it is no reason to stop of its own, as OpenAI has it."""
    is_either: bool = False
    """The answer is either calls or content in a form."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must hold special tokens, since parts begin with one."""
        formats = (self.reasoning, self.tool_format)
        return any(each is not None and each.has_special_tokens for each in formats)

    def create_parser(self) -> AnswerParser:
        """Return the parser of one choice."""
        has_short_ids = self.tool_format is not None and self.tool_format.short_ids
        return AnswerParser(
            reasoning=self.reasoning,
            is_reasoning=self.is_reasoning,
            tool_format=self.tool_format,
            tools=self.tools,
            max_calls=self.max_calls,
            is_either=self.is_either,
            new_id=_short_id if has_short_ids else _call_id,
        )


def check_tools(
    tools: Sequence[Mapping[str, Any]], tool_choice: str, path: Callable[[str], str]
) -> list[FieldViolation]:
    """Return what is wrong with the tools of a conversation.

    Args:
        tools: In OpenAI's form: `{"type": "function", "function": {"name": …, "parameters": …}}`.
        tool_choice: One of `raw.TOOL_CHOICES`, or the name of a tool.
        path: Gives the paths of "tools", of "tools.function" below each, and of "tool_choice", in the client's words.
    """
    return [FieldViolation(*found) for found in _find_wrong_tools(tools, tool_choice, path)]


def _find_wrong_tools(
    tools: Sequence[Mapping[str, Any]], tool_choice: str, path: Callable[[str], str]
) -> Iterator[tuple[str, ...]]:
    if len(tools) > MAX_TOOLS:
        why = f"{len(tools)} tools are above the limit {MAX_TOOLS}"
        yield path("tools"), why, str(len(tools)), str(MAX_TOOLS)
        return
    names = set[str]()
    for number, tool in enumerate(tools):
        function = tool["function"]
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield (
                tool_path(number, "name", path),
                f"{name!r:.80} is not 1 to 64 letters, digits, dots, dashes and underscores",
            )
        elif name in names:
            yield tool_path(number, "name", path), f"{name!r} is there twice"
        else:
            names.add(name)
        if parameters is not None and not isinstance(parameters, Mapping):
            yield tool_path(number, "parameters", path), "is not a JSON schema, which is a JSON object"
    if tool_choice in ("auto", "none"):
        return
    if not tools:
        yield path("tool_choice"), f"{tool_choice!r:.80} needs tools; none are given"
    elif tool_choice != "required" and tool_choice not in names:
        yield path("tool_choice"), f"{tool_choice!r:.80} is none of the tools that are given"


def tool_path(number: int, field: str, path: Callable[[str], str]) -> str:
    """Return the path of a field of a tool, `name` or `parameters`, in the client's words.

    Args:
        path: Gives the paths of "tools", of "tools.function" below each, and of "tools.parameters" below that.
    """
    name = path("tools.parameters") if field == "parameters" else field
    return f"{path('tools')}[{number}]{path('tools.function')}.{name.rpartition('.')[2]}"


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the name of each tool and the JSON schema of its parameters."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def to_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in a message as chat templates read it: with its arguments decoded.

    Arguments that are no JSON, or too deep, stay text: a model may have written them.
    """
    decoded: Any = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            decoded = read_json(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": decoded}}


def reasoning_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of a chat template that say how long the model thinks; None: as the template has it."""
    if effort is None:
        return {}
    effort = _EFFORTS.get(effort, effort)
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(9))
