"""Splits the text of an answer into reasoning, content and tool calls while it streams.

One state machine for all formats; a whole answer is the same machine fed once. However the text is cut into pieces, the
parts are the same once neighbours of one kind are joined:

    <think>Let me see.</think>  One moment.  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
           reasoning            content                  call of add             arguments

White space next to a border between parts belongs to none of them. What begins like a call and is none stays content.
The arguments of a call are a JSON object, whatever the model has written and wherever the answer ends: docs/adr/0043.

`tool_formats` declares how models write calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triptych.text.answer_text import (
    AnswerEndedError,
    AnswerText,
    Reading,
    find_first,
    longest_beginning,
)
from triptych.text.json_mending import MalformedCallError
from triptych.types.outputs import ToolCallDelta


class ReasoningFormat(NamedTuple):
    """How a model writes what it thinks before it answers."""

    name: str
    opening: str
    closing: str
    has_special_tokens: bool = False
    """Both are special tokens, which text leaves out unless they are to be kept."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes calls."""

    name: str
    read: Callable[[AnswerText, CallWriter, str], Reading[None]]
    """Reads what follows an opening, which is the last argument, up to the end of the call or calls."""
    openings: tuple[str, ...] = ()
    """Texts that open calls anywhere in the answer."""
    openings_at_start: tuple[str, ...] = ()
    """Texts that open calls only at the beginning of the answer, if a known tool is called."""
    has_special_tokens: bool = False
    """Openings are special tokens, which text leaves out unless they are to be kept."""
    template_marks: tuple[str, ...] = ()
    """Chat templates that hold one of these texts are of models that write calls so."""
    is_all: bool = False
    """The answer holds nothing but calls: what is none, since the answer was cut, is left out."""
    short_ids: bool = False
    """Ids of calls are nine letters and digits: the model's template takes no others."""


@dataclass(slots=True)
class AnswerParts:
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    offset: int = 0
    """Characters of content before these parts."""


class CallWriter:
    """Takes the calls that a format reads."""

    def __init__(
        self,
        text: AnswerText,
        parts: AnswerParts,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        only_known: bool,
        new_id: Callable[[], str],
        max_calls: int | None,
    ) -> None:
        self._only_known = only_known
        self._text = text
        self._parts = parts
        self._tools = tools
        self._new_id = new_id
        self._max_calls = max_calls
        self.num_calls = 0
        self.is_open = False
        """A call has begun and not ended."""

    def parameter(self, name: str, parameter: str) -> Mapping[str, Any]:
        """Return the JSON schema of a parameter; an empty one if the tool does not declare it."""
        properties = self._tools.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def begin(self, name: str) -> None:
        """Begin a call; what has been read of it cannot become content any more.

        Raises:
            MalformedCallError: There is no such tool, and the format only calls those that there are.
        """
        if self._only_known and name not in self._tools:
            raise MalformedCallError
        self.is_open = True
        self._text.forget()
        self.num_calls += 1
        offset = self._parts.offset + len(self._parts.content)
        self._add(ToolCallDelta(self.num_calls - 1, self._new_id(), name, offset=offset))

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call, a JSON text."""
        self._text.forget()
        self._add(ToolCallDelta(self.num_calls - 1, arguments=arguments))

    def end(self) -> None:
        """End the call; another one may follow."""
        self.is_open = False
        self._text.forget()

    def _add(self, delta: ToolCallDelta) -> None:
        if self._max_calls is None or self.num_calls <= self._max_calls:
            self._parts.tool_calls.append(delta)


class AnswerParser:
    """Splits one answer. Owned by one choice of a request."""

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
        tool_format: ToolCallFormat | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        max_calls: int | None = None,
        is_either: bool = False,
        new_id: Callable[[], str] = str,
    ) -> None:
        """
        Args:
            reasoning: How the model writes reasoning. None: it stays content.
            is_reasoning: The prompt has opened it already.
            tool_format: How the model writes calls. None: they stay content.
            tools: Name of each tool -> JSON schema of its parameters.
            max_calls: Calls after so many are left out. None: all are reported.
            is_either: The answer is either calls or content, by its beginning. In calls, what is none is left out.
            new_id: Returns the id of the next call.
        """
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._tool_format = tool_format
        self._is_either = is_either
        self._is_tagged = False
        """The answer has begun with a tag of calls."""
        self._text = AnswerText()
        self._parts = AnswerParts()
        self._calls = CallWriter(
            self._text,
            self._parts,
            tools or {},
            only_known=tool_format is not None and bool(tool_format.openings_at_start),
            new_id=new_id,
            max_calls=max_calls,
        )
        self._reading = self._read()
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls

    @property
    def is_cut(self) -> bool:
        """Whether the answer has ended inside of the arguments of a call."""
        return self._text.is_cut

    def push(self, text: str) -> None:
        """Add new text."""
        self._text.push(text)
        self._go_on()

    def finish(self) -> None:
        """Take in that the answer has ended: what was held back becomes a part."""
        self._text.is_ended = True
        self._go_on()

    def take(self) -> AnswerParts:
        """Return the parts since the last call, and forget them."""
        parts = self._parts
        taken = AnswerParts(parts.reasoning, parts.content, list(parts.tool_calls), parts.offset)
        parts.offset += len(parts.content)
        parts.reasoning = parts.content = ""
        parts.tool_calls.clear()
        return taken

    def _go_on(self) -> None:
        if not self._is_done and next(self._reading, _DONE) is _DONE:
            self._is_done = True

    def _read(self) -> Reading[None]:
        try:
            has_reasoned = yield from self._read_reasoning()
            yield from self._read_answer(has_reasoned)
        except AnswerEndedError:  # in what began like a call
            if not self._calls.is_open:
                self._text.rewind()
                self._add_content(self._text.take_all())

    def _read_reasoning(self) -> Reading[bool]:
        """Read what the model thinks, if it does; return whether it has."""
        if self._reasoning is None:
            return False
        if not self._is_reasoning:
            yield from self._text.skip_space()
            if not (yield from self._text.take_if(self._reasoning.opening)):
                self._text.rewind()
                return False
        yield from self._text.skip_space()
        yield from self._pass((self._reasoning.closing,), self._add_reasoning)
        self._text.forget()
        return True

    def _read_answer(self, skips_space: bool) -> Reading[None]:
        tools = self._tool_format
        openings = () if tools is None else tools.openings
        if tools is not None and (self._is_either or tools.openings_at_start):
            has_calls = yield from self._read_calls_at_start(tools)
            skips_space = skips_space or has_calls
            if self._is_either and not has_calls:
                openings = ()
        while True:
            if skips_space:
                yield from self._text.skip_space()
            opening = yield from self._pass(openings, self._add_content)
            if not opening or tools is None:
                return
            skips_space = yield from self._read_calls(tools, opening)

    def _read_calls_at_start(self, tools: ToolCallFormat) -> Reading[bool]:
        """Read calls that begin the answer; return whether there were any."""
        yield from self._text.skip_space()
        for opening in (*tools.openings_at_start, *(tools.openings if self._is_either else ())):
            if (yield from self._text.take_if(opening)):
                self._is_tagged = opening in tools.openings
                return (yield from self._read_calls(tools, opening))
        self._text.rewind()
        return False

    def _read_calls(self, tools: ToolCallFormat, opening: str) -> Reading[bool]:
        """Read calls behind an opening, which has been read; return whether there were any."""
        num_before = self._calls.num_calls
        num_held = self._text.num_held
        try:
            yield from tools.read(self._text, self._calls, opening)
        except MalformedCallError:
            if not self._calls.is_open:
                self._text.rewind()
            if self._calls.num_calls == num_before:
                self._add_content(self._text.take(num_held))
                self._text.forget()
                return False
        self._calls.end()
        return True

    def _pass(self, ends: Sequence[str], add: Callable[[str], None]) -> Reading[str]:
        """Pass text on up to one of these texts and read that; return it, or nothing if the answer has ended.

        White space before it is not passed on; it and the end can be read again by `rewind`.
        """
        text = self._text
        while True:
            text.forget()
            unread = text.unread
            place, end = find_first(unread, ends, 0)
            if not end and text.is_ended:
                add(text.take_all())
                text.forget()
                return ""
            known = place if end else len(unread) - longest_beginning(unread, ends)
            passed = unread[:known].rstrip() if ends else unread
            add(text.take(len(passed)))
            text.forget()
            if end:
                text.take(place + len(end) - len(passed))
                return end
            yield

    def _add_reasoning(self, text: str) -> None:
        self._parts.reasoning += text

    def _add_content(self, text: str) -> None:
        if not self._holds_only_calls:
            self._parts.content += text

    @property
    def _holds_only_calls(self) -> bool:
        """Whether what is no call has come about because the answer was cut."""
        if self._is_either:
            return self._is_tagged or self.num_calls > 0
        return self._tool_format is not None and self._tool_format.is_all


_DONE = object()
