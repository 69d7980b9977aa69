"""The form of a whole answer: what a conversation lets the model think, call and say. docs/adr/0050.

the client asks for              the answer is
calls (tool_choice)              [{"name": "add", "parameters": {…}}, …], whatever the model's own way of calling is
a form, and offers tools         the form, or calls in the model's own way
a form                           the form
strict tools                     text, with calls in the model's own way that fit the schemas
                                 each behind free reasoning, where the model reasons
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.text.tool_formats import JSON_LIST
from triptych.types.structured import StructuredOutputs
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.requests.tools import AnswerSplit

DEMANDED_FORMAT = JSON_LIST
"""The format of calls that a request demands."""
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A tool that an answer may call."""

    number: int
    """Its place in the request."""
    name: str
    parameters: str
    """JSON schema, as text."""
    is_strict: bool
    """A schema that cannot be enforced whole is refused."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Everything that an answer may be."""

    form: StructuredOutputs | None
    """The form of its content; None if it has no content, or free text."""
    tools: tuple[ToolForm, ...] = ()
    """The tools that it may call. Empty: none."""
    format: str = ""
    """Name of the format of the calls."""
    has_text: bool = False
    """Beside calls there is free text."""
    has_one: bool = False
    """There is one call at most."""
    reasoning: tuple[str, str] | None = None
    """The marks of the reasoning before it; None: there is none."""
    is_reasoning: bool = False
    """The prompt has opened the reasoning."""

    @property
    def texts(self) -> list[str]:
        """All texts that the client wrote, in no order."""
        return [
            *(self.form.texts if self.form is not None else ()),
            *(tool.parameters for tool in self.tools),
        ]


def answer_form(
    chat: RawChat, form: StructuredOutputs | None, split: AnswerSplit | None
) -> StructuredOutputs | AnswerForm | None:
    """Return the form of the answer to a conversation, or None if it is free.

    Args:
        form: What the client asks for. Calls that it demands win over it.
        split: How the answer is split into its parts.
    """
    may_call = split is not None and split.tool_format is not None
    has_strict = may_call and any(tool["function"].get("strict") is True for tool in chat.tools)
    if form is None and not chat.demands_calls and not has_strict:
        return None
    tools = _tools_of(chat) if may_call else ()
    reasoning = split.reasoning if split is not None else None
    if not tools and reasoning is None:
        return form
    assert split is not None, "else there are no tools and no reasoning"
    return AnswerForm(
        None if chat.demands_calls else form,
        tools,
        "" if split.tool_format is None else split.tool_format.name,
        has_text=form is None and not chat.demands_calls,
        has_one=not chat.parallel_tool_calls or chat.names_tool,
        reasoning=None if reasoning is None else (reasoning.opening, reasoning.closing),
        is_reasoning=split.is_reasoning,
    )


def _tools_of(chat: RawChat) -> tuple[ToolForm, ...]:
    return tuple(
        ToolForm(
            number, function["name"], json.dumps(_parameters_of(function)), function.get("strict") is True
        )
        for number, function in enumerate(tool["function"] for tool in chat.tools)
        if not chat.names_tool or function["name"] == chat.tool_choice
    )


def _parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or _NO_PARAMETERS
