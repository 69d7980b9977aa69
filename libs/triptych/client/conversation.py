"""Conversations in OpenAI's form -> the message to send: turns, tools, and how they become a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from triptych.errors import InvalidRequest
from triptych.v1 import chat_pb2

Message: TypeAlias = Mapping[str, Any]
"""One turn: `role`, `content`, and where the template uses them `name`, `tool_calls`, `tool_call_id`, `reasoning`."""
Conversation: TypeAlias = Sequence[Message]
Tool: TypeAlias = Mapping[str, Any]
"""`{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}`"""

_NAMES = {"reasoning_content": "reasoning"}  # of fields that OpenAI's servers and clients name otherwise
_TEXTS = ("role", "name", "tool_call_id", "reasoning")
_MODES = {
    "auto": chat_pb2.TOOL_MODE_AUTO,
    "none": chat_pb2.TOOL_MODE_NONE,
    "required": chat_pb2.TOOL_MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt, and what the model may answer."""

    tools: Sequence[Tool] = ()
    """Functions that the model may call."""
    tool_choice: str | Mapping[str, Any] | None = None
    """auto, none, required, or `{"type": "function", "function": {"name": …}}`. None: auto."""
    parallel_tool_calls: bool = True
    """The answer may hold several calls."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the model's chat template."""
    add_generation_prompt: bool = True
    """Open the assistant's turn; not with `continue_final_message`."""
    continue_final_message: bool = False
    """Go on with the last message in place of opening a new turn."""


DEFAULT_CHAT = ChatOptions()


def fill_chat(chat: chat_pb2.Chat, messages: Conversation, options: ChatOptions) -> None:
    """Write a conversation into the message.

    Raises:
        InvalidRequest: A value does not fit into it; names the field. All other checks are the server's.
    """
    fill_messages(chat, messages, "messages")
    for number, tool in enumerate(options.tools):
        try:
            function = tool["function"]
            parameters = function.get("parameters")
            chat.tools.add(
                name=function["name"],
                description=function.get("description") or "",
                parameters_json="" if parameters is None else json.dumps(parameters),
                strict=function.get("strict") is True,
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            expected = 'expected {"type": "function", "function": {"name": …, "parameters": {…}}}'
            raise InvalidRequest(f"tools[{number}]", f"{expected} ({error!r:.80})") from None
    _set_tool_choice(chat, options.tool_choice)
    if not options.parallel_tool_calls:
        chat.parallel_tool_calls = False
    if not options.add_generation_prompt:
        chat.add_generation_prompt = False
    chat.continue_final_message = options.continue_final_message
    if options.template_kwargs:
        try:
            chat.template_kwargs_json = json.dumps(dict(options.template_kwargs))
        except (TypeError, ValueError) as error:
            raise InvalidRequest("chat_template_kwargs", f"cannot be sent as JSON: {error}") from None


def fill_messages(chat: chat_pb2.Chat, messages: Conversation, where: str) -> None:
    """Write the turns of a conversation into the message.

    Raises:
        InvalidRequest: One is none; names it, as in `where[2].role`.
    """
    for number, message in enumerate(messages):
        _add_message(chat, message, f"{where}[{number}]")


def _add_message(chat: chat_pb2.Chat, message: Message, where: str) -> None:
    fields = {_NAMES.get(name, name): value for name, value in message.items() if value is not None}
    calls = fields.pop("tool_calls", ())
    content = fields.pop("content", "" if calls else None)
    if not {"role"} <= fields.keys() <= set(_TEXTS) or content is None:
        expected = "role, content and perhaps name, tool_calls, tool_call_id or reasoning"
        raise InvalidRequest(where, f"expected {expected}, not {sorted(message, key=str)}")
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name}", f"expected text, not {value!r:.80}")
    turn = chat.messages.add(**fields)
    for text in _texts(content, f"{where}.content"):
        turn.parts.add(text=text)
    try:
        for call in calls:
            function = call["function"]
            turn.tool_calls.add(id=call["id"], name=function["name"], arguments_json=function["arguments"])
    except (TypeError, KeyError) as error:
        expected = 'expected {"id": …, "type": "function", "function": {"name": …, "arguments": "…"}} each'
        raise InvalidRequest(f"{where}.tool_calls", f"{expected} ({error!r:.80})") from None


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return [part["text"] for part in content]
    raise InvalidRequest(
        where, f'expected text, or parts like {{"type": "text", "text": …}}, not {content!r:.80}'
    )


def _set_tool_choice(chat: chat_pb2.Chat, choice: str | Mapping[str, Any] | None) -> None:
    match choice:
        case None:
            return
        case "auto" | "none" | "required":
            chat.tool_choice.mode = _MODES[choice]
        case {"function": {"name": str(name)}}:
            chat.tool_choice.tool_name = name
        case _:
            known = 'auto, none, required or {"type": "function", "function": {"name": …}}'
            raise InvalidRequest("tool_choice", f"expected {known}, not {choice!r:.80}")
