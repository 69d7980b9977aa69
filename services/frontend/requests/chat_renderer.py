"""Renders conversations by a model's chat template, within a limit of time and memory.

    up to 4,096 characters    here, on the event loop; what takes more than 50 ms of CPU time is given up
    longer, or given up       in a child process, 3 s of CPU time at most

Templates are programs that come with models, and clients choose what they loop over. A short conversation takes some
0.1 ms, which a child would double or more.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from triptych.errors import InvalidRequest
from triptych.text.chat_template import ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych_services.frontend.offload.limited_process import KeptProcesses, ProcessEnded
from triptych_services.frontend.requests.plain_tools import render_with_tools
from triptych_services.frontend.requests.raw import WrittenMessages, WrittenVariable

INLINE_LIMIT_S = 0.05
"""CPU time of this process that a template may take on the event loop."""
RENDER_LIMIT_S = 3.0
"""CPU time that a template may take in a child process. 16,384 messages take 0.2 to 0.5 s."""
_NUM_KEPT = 3
"""Child processes that are kept, as many as the threads of a `TextModel`."""
_SCRIPT = Path(__file__).with_name("template_process.py")


class TakesLong(Exception):
    """A template was given up on the event loop; it has to be rendered on a thread."""


class _Alarm(BaseException):
    """Raised inside of a template. No Exception: a template catches none, but our code around it does."""


class ChatRenderer:
    """Owned by the `TextModel`. Its processes start with the first long conversations."""

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = RENDER_LIMIT_S) -> None:
        """
        Raises:
            ModelError: The template is not valid Jinja.
        """
        self._template = ChatTemplate(tokenizer)
        names = ("chat_template", "other_templates", "bos_token", "eos_token", "unk_token", "pad_token")
        source = {name: getattr(tokenizer, name) for name in names}
        self._is_missing = source["chat_template"] is None and not source["other_templates"]
        self._limit_s = limit_s
        self._is_slow = False
        """Whether the template was given up here before. Then it is not tried again."""
        self._is_armed = False
        """Whether an alarm ends what the main thread does."""
        self._processes = KeptProcesses(_SCRIPT, _NUM_KEPT, lambda: (source, b""))

    @property
    def knows_tools(self) -> bool:
        return self._template.knows_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]] | WrittenMessages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """Return the prompt: on the event loop within a short limit, on any other thread in a child process.

        Args:
            tools: The tools that the model is shown, as plain text where the template has no place for them.
            arguments: As the others of `ChatTemplate.render`.

        Raises:
            InvalidRequest: on `messages`: as `ChatTemplate.render`, or the template takes too long.
            TakesLong: It takes too long for the event loop.
        """
        arguments["tools"] = tools
        if self._is_missing:
            return self._template.render((), **arguments)  # says so
        if not isinstance(messages, WrittenMessages):
            if _is_on_loop():
                return self._render_here(messages, arguments)
            return self._render_in_child(messages, arguments)
        if _is_on_loop():
            raise TakesLong
        return self._render_in_child(messages, arguments)

    def _render_here(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        if self._is_slow or threading.current_thread() is not threading.main_thread():  # which has no alarm
            raise TakesLong
        before = signal.signal(signal.SIGVTALRM, self._raise_alarm)
        try:
            self._is_armed = True
            # Again and again: an exception is lost where it comes inside of a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, INLINE_LIMIT_S, INLINE_LIMIT_S)
            return render_with_tools(self._template, messages, arguments)
        except _Alarm:
            self._is_slow = True
            raise TakesLong from None
        finally:
            self._is_armed = False  # from here on an alarm that is on its way does nothing
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def _raise_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            raise _Alarm

    def _render_in_child(
        self, messages: Sequence[Mapping[str, Any]] | WrittenMessages, arguments: Mapping[str, Any]
    ) -> str:
        variables = b", ".join(
            b"%s: %s" % (_to_json(name), _to_json(each)) for name, each in arguments.items()
        )
        data = b'{"messages": %s, "arguments": {%s}}' % (_to_json(messages), variables)
        try:
            answer = self._processes.ask({}, self._limit_s, data)
        except ProcessEnded as error:
            why = (
                f"takes longer than the limit of {self._limit_s:g} s of CPU time"
                if error.was_late
                else "crashed"
            )
            raise InvalidRequest("messages", f"the model's chat template {why}") from None
        if "error" in answer:
            raise InvalidRequest("messages", answer["error"])
        text: bytes = answer.get("data", b"")
        return text.decode("utf-8", "surrogatepass")


def _to_json(value: Any) -> bytes:
    if isinstance(value, (WrittenMessages, WrittenVariable)):
        return value.json
    return json.dumps(value, default=dict).encode()


def _is_on_loop() -> bool:
    """Return whether this thread runs an event loop, which must not wait for another process."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
