"""Public messages -> raw requests: names mapped, what is not served listed, ranges left to the parser."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from triptych.errors import FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.output_limits import RepetitionDetection
from triptych.types.sampling import MAX_CHOICES, OutputKind
from triptych.types.submit import RequestHead
from triptych.v1 import chat_pb2, common_pb2, generation_pb2, sampling_pb2
from triptych.wire.generation import LOGPROB_FIELDS, RESPONSE_FLAGS, SAMPLING_PATHS, EventEncoder
from triptych.wire.structured import structured_from_proto
from triptych_services.frontend.requests.json_text import read_json
from triptych_services.frontend.requests.raw import (
    MAX_DOCUMENTS,
    RawChat,
    RawRequest,
    why_too_many_messages,
)
from triptych_services.frontend.requests.tools import MAX_TOOLS, reasoning_variables, to_call

NOT_SERVED = "this version does not serve it yet; leave it out"
_MAX_UNSUPPORTED = 64  # parts of messages that are reported; a client needs no more to see what is wrong
_MESSAGE_BYTES = 64  # an empty message costs as much as so many bytes
# Stand in for messages that are refused already, so that they are not reported missing as well.
_REFUSED_MESSAGES = ({"role": "user", "content": ""},)
_PROMPT_PATHS = {"text": "text.text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_KWARGS_PATH = "chat.template_kwargs_json"
CHAT_PATHS = {
    "template_kwargs": _KWARGS_PATH,
    "tools": "chat.tools",
    "tools.function": "",
    "tools.parameters": "parameters_json",
    "tool_choice": "chat.tool_choice",
}
"""Fields of a `RawChat` besides its messages -> their paths in a `Generation`."""
_PATHS = {
    **SAMPLING_PATHS,
    "cache_salt": "cache.salt",
    "truncate_prompt_tokens": "truncation.max_tokens",
    "echo": "response.echo",
    **CHAT_PATHS,
    "deadline_s": "the call's deadline",
}
_PATHS_BY_PROMPT: Mapping[str | None, Mapping[str, str]] = {
    None: _PATHS,
    **{kind: {**_PATHS, "prompt": path} for kind, path in _PROMPT_PATHS.items()},
}
"""Kind of the prompt -> the paths of a request with such a prompt."""
_LEFT_SIDES = (common_pb2.TRUNCATION_SIDE_UNSPECIFIED, common_pb2.TRUNCATION_SIDE_LEFT)
_FORM_PATHS = {"json_schema": "json_schema.schema", "choice": "choice.values", "grammar": "grammar.text"}
_TOOL_MODES = {
    chat_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    chat_pb2.TOOL_MODE_AUTO: "auto",
    chat_pb2.TOOL_MODE_NONE: "none",
    chat_pb2.TOOL_MODE_REQUIRED: "required",
}
_EFFORTS = {
    chat_pb2.REASONING_EFFORT_UNSPECIFIED: None,
    chat_pb2.REASONING_EFFORT_NONE: "none",
    chat_pb2.REASONING_EFFORT_LOW: "low",
    chat_pb2.REASONING_EFFORT_MEDIUM: "medium",
    chat_pb2.REASONING_EFFORT_HIGH: "high",
    chat_pb2.REASONING_EFFORT_MINIMAL: "minimal",
    chat_pb2.REASONING_EFFORT_XHIGH: "xhigh",
    chat_pb2.REASONING_EFFORT_MAX: "max",
}


def to_raw_request(
    request_id: str,
    generation: generation_pb2.Generation,
    deadline_s: float | None,
    *,
    answer: Mapping[str, Any] | None = None,
    resumes: bool = False,
) -> RawRequest:
    """Return the request as the frontend knows it; what only this API can see to be wrong is noted in it.

    `answer`, `resumes`: As in `RawRequest`.
    """
    violations: list[FieldViolation] = []
    unsupported = ["cache.bypass"] if generation.cache.bypass else []
    sampling = _sampling_fields(generation, unsupported)
    prompt: Any = None
    kind = generation.WhichOneof("prompt")
    paths = _PATHS_BY_PROMPT[kind]
    match kind:
        case "text":
            prompt = generation.text.text
        case "token_ids":
            prompt = generation.token_ids.ids
        case "chat":
            prompt, violations = to_chat(generation.chat)
            unsupported += unsupported_of_chat(generation.chat)
    if generation.HasField("structured_outputs"):
        form = generation.structured_outputs
        name = form.WhichOneof("form")
        sampling["structured_outputs"] = structured_from_proto(form)
        if name is not None:
            paths = {**paths, "structured_outputs": f"structured_outputs.{_FORM_PATHS.get(name, name)}"}
        if form.grammar.syntax not in sampling_pb2.GrammarSyntax.values():
            path = "structured_outputs.grammar.syntax"
            violations.append(FieldViolation(path, f"{form.grammar.syntax} is none of 0..2"))
    truncation = generation.truncation if generation.HasField("truncation") else None
    if truncation is not None and truncation.side not in common_pb2.TruncationSide.values():
        violations.append(FieldViolation("truncation.side", f"{truncation.side} is none of 0..2"))
    return RawRequest(
        api="grpc",
        prompt=prompt,
        add_special_tokens=_given(generation.text, "add_special_tokens") if kind == "text" else None,
        head=RequestHead(request_id, generation.priority, generation.tenant, generation.cache.salt),
        model=generation.model,
        sampling=sampling,
        takes_rest_of_context=generation.length.HasField("rest_of_context"),
        output_kind=OutputKind.FINAL_ONLY if generation.response.whole_choices else OutputKind.DELTA,
        min_interval_tokens=generation.response.min_interval_tokens,
        emitted=_emitted(generation, violations),
        truncate_prompt_tokens=truncation.max_tokens if truncation is not None else None,
        keeps_beginning=truncation is not None and truncation.side not in _LEFT_SIDES,
        adapter=generation.adapter,
        echo=generation.response.echo,
        deadline_s=deadline_s,
        answer=answer,
        resumes=resumes,
        paths=paths,
        violations=tuple(violations),
        unsupported=tuple(unsupported),
    )


def write_answer(generation: generation_pb2.Generation) -> dict[str, Any]:
    """Return what another frontend must know to send the rest of an answer."""
    response = base64.b64encode(generation.response.SerializeToString()).decode()
    return {"response": response, "stop_token_ids": list(generation.length.stop_token_ids)}


def read_answer(answer: Mapping[str, Any], last_sequence: int) -> EventEncoder:
    """Return what sends the rest of an answer, behind the message of this number."""
    options = generation_pb2.ResponseOptions.FromString(base64.b64decode(answer["response"]))
    return EventEncoder(options, answer["stop_token_ids"], last_sequence=last_sequence)


def chat_size(chat: chat_pb2.Chat) -> int:
    """Return how much work it is to read a conversation, in bytes of its text."""
    return chat.ByteSize() + _MESSAGE_BYTES * len(chat.messages)


def to_chat(chat: chat_pb2.Chat) -> tuple[RawChat, list[FieldViolation]]:
    """Return the conversation, and what is wrong with how it is written."""
    if (why := why_too_many_messages(len(chat.messages))) is not None:
        return RawChat(_REFUSED_MESSAGES), [FieldViolation("chat.messages", why)]
    template_kwargs, violations = _json_object(chat.template_kwargs_json, _KWARGS_PATH)
    for name, value, known in (
        ("tool_choice.mode", chat.tool_choice.mode, _TOOL_MODES),
        ("reasoning_effort", chat.reasoning_effort, _EFFORTS),
    ):
        if value not in known:
            violations.append(FieldViolation(f"chat.{name}", f"{value} is none of 0..{len(known) - 1}"))
    if _given(chat, "add_generation_prompt") and chat.continue_final_message:
        why = "true contradicts continue_final_message: a turn is opened or continued"
        violations.append(FieldViolation("chat.add_generation_prompt", why))
    if too_long := _too_long_lists(chat):  # nothing is made of them
        return RawChat(_REFUSED_MESSAGES), [*violations, *too_long]
    tools = tuple(_tool(tool, f"chat.tools[{number}]", violations) for number, tool in enumerate(chat.tools))
    effort = _EFFORTS.get(chat.reasoning_effort)
    return RawChat(
        [_message(message) for message in chat.messages],
        _given(chat, "add_generation_prompt") is not False,
        reasoning_variables(effort) | template_kwargs,
        tools=tools,
        tool_choice=chat.tool_choice.tool_name or _TOOL_MODES.get(chat.tool_choice.mode, "auto"),
        parallel_tool_calls=_given(chat, "parallel_tool_calls") is not False,
        includes_reasoning=_given(chat, "include_reasoning") is not False,
        continue_final_message=chat.continue_final_message,
        documents=tuple(
            {field.name: value for field, value in document.ListFields()} for document in chat.documents
        ),
    ), violations


def _too_long_lists(chat: chat_pb2.Chat) -> list[FieldViolation]:
    """Return which lists beside the messages are longer than they may be."""
    counts = [
        ("chat.tools", "tools", len(chat.tools), MAX_TOOLS),
        ("chat.documents", "documents", len(chat.documents), MAX_DOCUMENTS),
    ]
    counts += [
        (f"chat.messages[{index}].tool_calls", "calls", len(message.tool_calls), MAX_TOOLS)
        for index, message in enumerate(chat.messages)
    ]
    return [
        FieldViolation(path, f"{count} {what} are above the limit {limit}", str(count), str(limit))
        for path, what, count, limit in counts
        if count > limit
    ]


def _message(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    """Return a turn as chat templates read it."""
    content = "\n".join(part.text for part in message.parts if part.HasField("text"))
    turn: dict[str, Any] = {"role": message.role, "content": content}
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
        "tool_calls": [to_call(call.id, call.name, call.arguments_json) for call in message.tool_calls],
    }
    return turn | {name: value for name, value in named.items() if value}


def _tool(tool: chat_pb2.Tool, path: str, violations: list[FieldViolation]) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates read."""
    parameters, wrong = _json_object(tool.parameters_json, f"{path}.parameters_json")
    violations += wrong
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if parameters:
        function["parameters"] = parameters
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def unsupported_of_chat(chat: chat_pb2.Chat) -> list[str]:
    """Return the paths of the fields that are set and not served, the first ones if there are many."""
    paths: list[str] = []
    for index, message in enumerate(chat.messages):
        where = f"chat.messages[{index}]"
        for number, part in enumerate(message.parts):
            if (kind := part.WhichOneof("part")) not in ("text", None):
                paths.append(f"{where}.parts[{number}].{kind}")
                if len(paths) == _MAX_UNSUPPORTED:
                    return paths
    return paths


def to_tokenize_prompt(
    request: generation_pb2.TokenizeRequest,
) -> tuple[str | RawChat, bool | None, str]:
    """Return what to tokenize, whether special tokens are added around it (None: as usual), and its path.

    Raises:
        InvalidRequest, FeatureDisabled: What is wrong with it, or not served.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return request.text.text, _given(request.text, "add_special_tokens"), _PROMPT_PATHS["text"]
        case "chat":
            chat, violations = to_chat(request.chat)
            if request.with_offsets:
                why = "a conversation is rendered first: there is no text of yours that tokens could stand in"
                violations.append(FieldViolation("with_offsets", why))
            if violations:
                raise InvalidRequest(violations)
            if unsupported := unsupported_of_chat(request.chat):
                raise FeatureDisabled(unsupported, NOT_SERVED)
            return chat, None, _PROMPT_PATHS["chat"]
        case _:
            raise InvalidRequest("prompt", "none is given; set text or chat")


def _sampling_fields(generation: generation_pb2.Generation, unsupported: list[str]) -> dict[str, Any]:
    """Return the sampling fields that the client set, by their names in `SamplingParams`."""
    fields: dict[str, Any] = {}
    for message in (generation.sampling, generation.length):
        fields.update({field.name: value for field, value in message.ListFields()})
    fields.pop("rest_of_context", None)
    if (repetition := fields.get("repetition_detection")) is not None:
        fields["repetition_detection"] = RepetitionDetection(
            repetition.max_pattern_size, repetition.min_count, repetition.min_pattern_size
        )
    if "allowed_token_ids" in fields:
        fields["allowed_token_ids"] = generation.sampling.allowed_token_ids.ids
    response = generation.response
    for name, flag in RESPONSE_FLAGS.items():
        if (value := _given(response, flag)) is not None:
            fields[name] = value
    for name in LOGPROB_FIELDS:
        if response.HasField(name):
            options = getattr(response, name)
            candidates = options.WhichOneof("candidates")
            if candidates in ("top", None):
                fields[name] = options.top
            elif candidates == "token_ids" and name == "logprobs":
                fields["logprob_token_ids"] = options.token_ids.ids
            else:
                unsupported.append(f"response.{name}.{candidates}")
    return fields


def _emitted(generation: generation_pb2.Generation, violations: list[FieldViolation]) -> dict[int, list[int]]:
    """Return the output tokens so far of the choices to go on with, by index."""
    if (count := len(generation.emitted)) > MAX_CHOICES:
        why = f"{count} choices are above the limit {MAX_CHOICES}"
        violations.append(FieldViolation("emitted", why, str(count), str(MAX_CHOICES)))
        return {}
    emitted: dict[int, list[int]] = {}
    for number, choice in enumerate(generation.emitted):
        if choice.index in emitted:
            violations.append(FieldViolation(f"emitted[{number}].index", f"{choice.index} is there twice"))
        emitted[choice.index] = list(choice.token_ids)
    return emitted


def _json_object(text: str, path: str) -> tuple[dict[str, Any], list[FieldViolation]]:
    """Return the object that a field of JSON text holds, an empty one if it is empty, and what is wrong with it."""
    if not text:
        return {}, []
    try:
        value = read_json(text)
    except ValueError as error:
        return {}, [FieldViolation(path, f"is not JSON: {error}")]
    if not isinstance(value, dict):
        return {}, [FieldViolation(path, "is not a JSON object")]
    return value, []


def _given(message: Any, field: str) -> Any:
    """Return the value of an optional field, or None where the client left it out."""
    return getattr(message, field) if message.HasField(field) else None
