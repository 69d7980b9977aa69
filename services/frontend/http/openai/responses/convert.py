"""Turns requests for responses into raw requests, as chat completions become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import FieldViolation
from triptych_services.frontend.http.body import JsonObject
from triptych_services.frontend.http.generation import (
    REFUSED_PROMPT,
    Form,
    base_request,
    is_refused,
    json_form,
    with_structured_outputs,
)
from triptych_services.frontend.http.openai.responses.schema import (
    LOGPROBS,
    MAX_METADATA,
    FunctionTool,
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    NamedFunction,
    NamespaceTool,
    OutputText,
    Refusal,
    ResponsesRequest,
)
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.requests.tools import reasoning_variables
from triptych_services.frontend.requests.turns import Turns

_PATHS = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "template_kwargs": "chat_template_kwargs",
    "tools.function": "",
}
"""Fields of a raw request -> their paths in a body, where they differ."""


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """How an answer is sent. It outlives the body."""

    is_streamed: bool
    wants_logprobs: bool
    repeated: dict[str, Any]
    """Fields of the request that its answer repeats."""
    namespaces: dict[str, str]
    """Name of a tool -> its namespace, of those that are in one."""


def read_response(
    body: ResponsesRequest, *, label: str, deadline_s: float | None
) -> tuple[ResponsesOptions, RawRequest]:
    """Return what `answer_options` and `responses_request` make of a body."""
    raw = responses_request(body, label=label, deadline_s=deadline_s)
    return answer_options(body), raw


def responses_request(body: ResponsesRequest, *, label: str, deadline_s: float | None) -> RawRequest:
    """Return the conversation as one raw request."""
    base = base_request(body, _read_form(body), label=label, deadline_s=deadline_s)
    paths = {**base.paths, **_PATHS, "logprobs": "include" if body.top_logprobs is None else "top_logprobs"}
    turns = _to_turns(body)
    violations = [*base.violations, *turns.violations, *_misuse(body)]
    prompt: RawChat | str | None = None
    is_all_unserved = body.input and base.unsupported and not turns.messages
    if turns.violations or is_all_unserved or is_refused(body, "input"):
        prompt = REFUSED_PROMPT
    elif body.input is not None:
        prompt = _to_chat(body, turns)
    truncate = base.truncate_prompt_tokens
    if truncate is None and body.truncation == "auto":
        truncate = -1
    logprobs = (body.top_logprobs or 0) if _wants_logprobs(body) else None
    return replace(
        base,
        prompt=prompt,
        sampling={**base.sampling, "max_tokens": body.max_output_tokens, "logprobs": logprobs},
        truncate_prompt_tokens=truncate,
        paths=paths,
        violations=tuple(violations),
    )


def answer_options(body: ResponsesRequest) -> ResponsesOptions:
    """Return how the answer is to be sent."""
    namespaces = {
        function.name: tool.name
        for tool in body.tools or ()
        if isinstance(tool, NamespaceTool)
        for function in _functions([tool])
    }
    return ResponsesOptions(bool(body.stream), _wants_logprobs(body), _repeated(body), namespaces)


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def _misuse(body: ResponsesRequest) -> list[FieldViolation]:
    """Return fields that are valid by themselves and not beside others."""
    found = []
    if body.stream_options is not None and not body.stream:
        found.append(("stream_options", "only a stream has options; set stream to true"))
    if _wants_logprobs(body) and body.tools and body.tool_choice != "none":
        path = "include" if body.top_logprobs is None else "top_logprobs"
        found.append(
            (path, "log-probabilities are not reported of answers that may call tools; leave one out")
        )
    if (count := len(body.metadata or ())) > MAX_METADATA:
        found.append(("metadata", f"{count} entries are above the limit {MAX_METADATA}"))
    return [FieldViolation(path, why) for path, why in found]


def _read_form(body: ResponsesRequest) -> Form:
    form, given = Form(), body.text.format if body.text is not None else None
    if given is not None:
        form = json_form(
            given.type,
            given.schema_,
            "text.format",
            "text.format.schema",
            is_strict=given.strict is not False,
        )
    return with_structured_outputs(form, "text.format", body.structured_outputs)


def _to_chat(body: ResponsesRequest, turns: Turns) -> RawChat:
    choice = body.tool_choice
    effort = body.reasoning.effort if body.reasoning is not None else None
    return RawChat(
        messages=turns.messages,
        template_kwargs={**reasoning_variables(effort), **(body.chat_template_kwargs or {})},
        tools=list(map(_to_tool, _functions(body.tools or ()))),
        tool_choice=choice.name if isinstance(choice, NamedFunction) else _word(choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        includes_reasoning=body.include_reasoning is not False,
    )


def _word(choice: Any) -> str:
    return choice if isinstance(choice, str) else "auto"


def _functions(tools: Sequence[JsonObject]) -> Iterator[FunctionTool]:
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield tool
        elif isinstance(tool, NamespaceTool):
            yield from _functions(tool.tools)


def _to_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict or None,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _to_turns(body: ResponsesRequest) -> Turns:
    turns = Turns()
    if body.instructions:
        turns.add("system", body.instructions, "instructions")
    if isinstance(body.input, str):
        turns.add("user", body.input, "input")
        return turns
    for number, item in enumerate(body.input or ()):
        path = f"input[{number}]"
        match item:
            case InputMessage():
                role = "system" if item.role == "developer" else item.role
                turns.add(role, _text_of(item.content), f"{path}.content")
            case InputReasoning():
                thoughts = item.content or item.summary or ()
                turns.add_reasoning("\n".join(each.text for each in thoughts), f"{path}.content")
            case InputFunctionCall():
                turns.add_call(item.call_id, item.name, item.arguments, path)
            case InputFunctionCallOutput():
                turns.add_result(item.call_id, _text_of(item.output), f"{path}.output")
    return turns


def _text_of(content: str | Sequence[JsonObject]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        part.refusal if isinstance(part, Refusal) else part.text
        for part in content
        if isinstance(part, (InputText, OutputText, Refusal))
    )


def _repeated(body: ResponsesRequest) -> dict[str, Any]:
    """Return what the answer repeats of the request, as OpenAI's clients expect it."""
    choice, given = body.tool_choice, body.text.format if body.text is not None else None
    format: dict[str, Any] = {"type": "text" if given is None else given.type}
    if given is not None and given.type == "json_schema":
        format |= {"name": given.name or "", "schema": given.schema_, "strict": given.strict}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "store": False,
        "text": {"format": format},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else _word(choice),
        "tools": list(map(_repeated_tool, body.tools or ())),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        **{name: getattr(body, name) for name in ("temperature", "top_p")},
    }


def _repeated_tool(tool: JsonObject) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        tools = list(map(_repeated_tool, tool.tools))
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description or "",
            "tools": tools,
        }
    names = ("type", "name", "description", "parameters", "strict")
    return {name: getattr(tool, name, None) for name in names}
