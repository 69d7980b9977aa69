"""Answers of POST /v1/messages: blocks -> content blocks, whole or as the events of a stream; and errors."""

from __future__ import annotations

import json
from typing import Any

from triptych.types.outputs import Usage
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.blocks import Block, BlockAnswer, BlockKind, Stage, Step
from triptych_services.frontend.http.errors import Dialect, HttpError

INVALID_JSON = "INVALID_JSON"
"""The field that holds arguments of a call that are no JSON object: `input` is always one."""
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> Anthropic's name of the error; all others are api_error."""
_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""Kind of a block -> the type of its deltas, and the field that has the new text."""


def error_object(error: HttpError, request_id: str) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it."""
    fields = {"type": _ERROR_TYPES.get(error.status, "api_error"), "message": error.message}
    return {"type": "error", "error": fields, "request_id": request_id}


DIALECT = Dialect("/v1/messages", "request-id", error_object)


class MessagesFormat:
    """/v1/messages: one object per HTTP request."""

    def __init__(self, *, request_id: str) -> None:
        self.answer_id = f"msg_{request_id}"
        self._request_id = request_id

    def whole(self, answer: BlockAnswer) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        return {
            **self._message(answer),
            "content": [{**_begun(block), **_content(block)} for block in answer.blocks],
            **_ending(answer),
            "usage": _usage(answer.usage),
        }

    def opening(self, answer: BlockAnswer) -> str:
        message = {
            **self._message(answer),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(answer.num_prompt_tokens)),
        }
        return _event("message_start", message=message) + _event("ping")

    def step(self, step: Step) -> str:
        index = step.block.index
        match step.stage:
            case Stage.BEGIN:
                return _event("content_block_start", index=index, content_block=_begun(step.block))
            case Stage.GROW:
                type, name = _DELTAS[step.block.kind]
                delta = f'{{"type":"{type}","{name}":{json.dumps(step.text)}}}'
                head = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
                return f'{head}{index},"delta":{delta}}}\n\n'
            case Stage.END:
                return _event("content_block_stop", index=index)

    def closing(self, answer: BlockAnswer) -> str:
        end = _event("message_delta", delta=_ending(answer), usage=_usage(answer.usage))
        return end + _event("message_stop")

    def failure(self, error: HttpError) -> str:
        """Return the last event of a stream that has failed."""
        return f"event: error\ndata: {to_json(error_object(error, self._request_id))}\n\n"

    def _message(self, answer: BlockAnswer) -> dict[str, Any]:
        return {"id": self.answer_id, "type": "message", "role": "assistant", "model": answer.model}


def _begun(block: Block) -> dict[str, Any]:
    """Return a content block without content."""
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _content(block: Block) -> dict[str, Any]:
    """Return the field of a block that grows in a stream."""
    match block.kind:
        case BlockKind.REASONING:
            return {"thinking": block.text}
        case BlockKind.TEXT:
            return {"text": block.text}
    arguments = _arguments(block.text)
    return {"input": {INVALID_JSON: block.text} if arguments is None else arguments}


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, or None if they are no JSON object that can be sent."""
    try:
        arguments = json.loads(text)
        to_json(arguments)  # has neither NaN nor an infinity
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _ending(answer: BlockAnswer) -> dict[str, Any]:
    sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    if sequence is not None:
        reason = "stop_sequence"
    elif answer.is_cut:
        reason = "max_tokens"
    else:
        reason = "tool_use" if answer.has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts; tokens found in the prefix cache are not among the input tokens."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n"
