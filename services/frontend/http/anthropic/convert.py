"""Turns Anthropic's requests into raw requests, as chat completions become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triptych.errors import FieldViolation, InvalidRequest
from triptych_services.frontend.http.anthropic.schema import (
    AssistantTurn,
    ClientTool,
    CountTokensRequest,
    MessagesFields,
    MessagesRequest,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolByName,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from triptych_services.frontend.http.body import JsonObject, refuse_unsupported
from triptych_services.frontend.http.generation import (
    REFUSED_PROMPT,
    Form,
    base_request,
    is_refused,
    json_form,
    with_structured_outputs,
)
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.requests.tools import reasoning_variables
from triptych_services.frontend.requests.turns import Turns

CHAT_PATHS = {
    "prompt": "messages",
    "template_kwargs": "chat_template_kwargs",
    "tools.function": "",
    "tools.parameters": "input_schema",
}
"""Fields of a `RawChat` -> their paths in a body, where they differ."""
_ATTRIBUTION = "x-anthropic-billing-header:"
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_messages(body: MessagesRequest, *, label: str, deadline_s: float | None) -> tuple[bool, RawRequest]:
    """Return whether the answer is streamed, and what `messages_request` makes of a body."""
    return bool(body.stream), messages_request(body, label=label, deadline_s=deadline_s)


def read_count(body: CountTokensRequest) -> tuple[str, RawChat]:
    """Return the model that is named, and what `chat_to_count` makes of a body."""
    return body.model or "", chat_to_count(body)


def messages_request(body: MessagesRequest, *, label: str, deadline_s: float | None) -> RawRequest:
    """Return the conversation as one raw request."""
    base = base_request(body, _read_form(body), label=label, deadline_s=deadline_s)
    paths = {**base.paths, **CHAT_PATHS, "stop": "stop_sequences"}
    head = base.head
    if not body.tenant and body.metadata is not None and body.metadata.user_id:
        head, paths["tenant"] = replace(head, tenant=body.metadata.user_id), "metadata.user_id"
    violations = list(base.violations)
    if body.max_tokens is None and not is_refused(body, "max_tokens"):
        violations.append(FieldViolation("max_tokens", "is missing; say how many tokens the answer may have"))
    turns = _to_turns(body)
    violations += turns.violations
    prompt: RawChat | str | None = None
    is_all_unserved = body.messages and base.unsupported and not turns.messages
    if turns.violations or is_all_unserved or is_refused(body, "messages"):
        prompt = REFUSED_PROMPT
    elif body.messages is not None:
        prompt = _to_chat(body, turns)
    return replace(
        base,
        prompt=prompt,
        sampling={**base.sampling, "max_tokens": body.max_tokens, "stop": body.stop_sequences},
        head=head,
        paths=paths,
        violations=tuple(violations),
    )


def chat_to_count(body: CountTokensRequest) -> RawChat:
    """Return the conversation whose tokens are to be counted.

    Raises:
        InvalidRequest, FeatureDisabled: All that is wrong with the body.
    """
    turns = _to_turns(body)
    violations = [*body.violations, *turns.violations]
    if not body.messages and not violations:
        violations.append(FieldViolation("messages", "none are given; send at least 1"))
    if violations:
        raise InvalidRequest(violations)
    refuse_unsupported(body)
    return _to_chat(body, turns)


def _to_chat(body: MessagesFields, turns: Turns) -> RawChat:
    config, choice, thinking = body.output_config, body.tool_choice, body.thinking
    switches = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
    variables = {
        **reasoning_variables(config.effort if config is not None else None),
        **(switches.get(thinking.type, {}) if thinking is not None else {}),
        **(body.chat_template_kwargs or {}),
    }
    if isinstance(choice, ToolByName):
        tool_choice = choice.name
    else:
        tool_choice = "auto" if choice is None else _TOOL_CHOICES[choice.type]
    return RawChat(
        messages=turns.messages,
        template_kwargs=variables,
        tools=[_to_tool(tool) for tool in body.tools or () if isinstance(tool, ClientTool)],
        tool_choice=tool_choice,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        includes_reasoning=thinking is None or thinking.display != "omitted",
        continue_final_message=bool(turns.messages) and turns.messages[-1]["role"] == "assistant",
    )


def _to_tool(tool: ClientTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _read_form(body: MessagesRequest) -> Form:
    form, given = Form(), body.output_config.format if body.output_config is not None else None
    if given is not None:
        form = json_form(given.type, given.schema_, "output_config.format", "output_config.format.schema")
    return with_structured_outputs(form, "output_config.format", body.structured_outputs)


def _to_turns(body: MessagesFields) -> Turns:
    turns = Turns()
    system = body.system
    if isinstance(system, list):
        system = [part for part in system if not _is_attribution(part)]
    if system:
        turns.add("system", _text_of(system), "system")
    for number, turn in enumerate(body.messages or ()):
        path = f"messages[{number}].content"
        match turn:
            case SystemTurn():
                turns.add("system", _text_of(turn.content), path)
            case UserTurn():
                _add_user(turns, turn, path)
            case AssistantTurn():
                _add_assistant(turns, turn, path)
    last = turns.messages[-1] if turns.messages else {}
    if last.get("role") == "assistant" and (last.get("tool_calls") or not last["content"]):
        why = "the last turn is one of the assistant without text to go on with; send what comes after it"
        turns.violations.append(FieldViolation("messages", why))
    return turns


def _is_attribution(part: JsonObject) -> bool:
    """Return whether a block of the system prompt is Claude Code's note on itself.

    It says nothing to the model, and differs from request to request: no prefix would be found in the cache.
    """
    return isinstance(part, TextBlock) and part.text.startswith(_ATTRIBUTION)


def _add_user(turns: Turns, turn: UserTurn, path: str) -> None:
    """Add results of calls as turns of their own; texts side by side are one turn."""
    if isinstance(turn.content, str):
        turns.add("user", turn.content, path)
        return
    texts: list[str] = []
    for number, block in enumerate(turn.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                turns.add("user", "\n".join(texts), path)
                texts = []
            turns.add_result(block.tool_use_id, _text_of(block.content or ""), f"{path}[{number}]")
    if texts:
        turns.add("user", "\n".join(texts), path)


def _add_assistant(turns: Turns, turn: AssistantTurn, path: str) -> None:
    if isinstance(turn.content, str):
        turns.add("assistant", turn.content, path)
        return
    for number, block in enumerate(turn.content):
        where = f"{path}[{number}]"
        match block:
            case TextBlock():
                turns.add("assistant", block.text, f"{where}.text")
            case ThinkingBlock():
                turns.add_reasoning(block.thinking, f"{where}.thinking")
            case ToolUseBlock():
                turns.add_call(block.id, block.name, block.input, where)


def _text_of(content: str | Sequence[JsonObject]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextBlock))
