"""Answers of POST /v1/responses: blocks -> output items, whole or as the typed events of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from triptych.types.logprobs import TokenLogprobs
from triptych.types.outputs import FinishReason, Usage
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.blocks import Block, BlockAnswer, BlockKind, Stage, Step
from triptych_services.frontend.http.errors import HttpError
from triptych_services.frontend.http.openai.logprobs import chat_entries_json

_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_EVENTS_OF_TEXT = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponsesFormat:
    """/v1/responses: one object per HTTP request."""

    def __init__(
        self,
        *,
        request_id: str,
        created_unix_s: int,
        repeated: Mapping[str, Any],
        wants_logprobs: bool,
        namespaces: Mapping[str, str],
    ) -> None:
        """
        Args:
            repeated: Fields of the request that the answer repeats.
            namespaces: Name of a tool -> its namespace, of those that are in one.
        """
        self._namespaces = namespaces
        self.answer_id = f"resp_{request_id}"
        self._request_id = request_id
        self._shared = {
            "id": self.answer_id,
            "object": "response",
            "created_at": created_unix_s,
            **repeated,
        }
        self._wants_logprobs = wants_logprobs
        self._numbers = itertools.count()
        self._answer = BlockAnswer()
        self._delta_head = ""

    def whole(self, answer: BlockAnswer) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        has_enough = answer.finish_reason is FinishReason.LENGTH
        return {
            **self._response(answer, "incomplete" if answer.is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if has_enough else None,
            "output": self._items(answer.blocks),
            "usage": _usage(answer.usage),
        }

    def opening(self, answer: BlockAnswer) -> str:
        self._answer = answer
        response = {**self._response(answer, "in_progress"), "output": []}
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=response) for kind in kinds)

    def step(self, step: Step) -> str:
        block = step.block
        if step.stage is Stage.GROW:
            return self._delta(step)
        place = {"item_id": self._id(block), "output_index": block.index}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        if step.stage is Stage.BEGIN:
            item = self._item(block, "in_progress")
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind is not BlockKind.CALL:
                part = self._part(block)
                events.append(self._event("response.content_part.added", **place, part=part))
            kind = f"{_EVENTS_OF_TEXT[block.kind]}.delta"
            self._delta_head = f"event: {kind}\ndata: {to_json({'type': kind, **place})[:-1]}"
            return "".join(events)
        name = "arguments" if block.kind is BlockKind.CALL else "text"
        whole = {name: block.text, **self._logprobs(block, block.logprobs)}
        if block.kind is BlockKind.CALL:
            whole["name"] = block.name
        events = [self._event(f"{_EVENTS_OF_TEXT[block.kind]}.done", **place, **whole)]
        if block.kind is not BlockKind.CALL:
            part = self._part(block)
            events.append(self._event("response.content_part.done", **place, part=part))
        item = self._item(block, _status(block))
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return "".join(events)

    def _delta(self, step: Step) -> str:
        """Return the event of new text; what all of a block share was written when it began."""
        logprobs = ""
        if step.block.kind is BlockKind.TEXT:
            logprobs = f',"logprobs":{chat_entries_json(step.logprobs) if self._wants_logprobs else "[]"}'
        number, text = next(self._numbers), json.dumps(step.text)
        return f'{self._delta_head},"sequence_number":{number},"delta":{text}{logprobs}}}\n\n'

    def closing(self, answer: BlockAnswer) -> str:
        response = self.whole(answer)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: HttpError) -> str:
        """Return the last event of a stream that has failed."""
        code = "rate_limit_exceeded" if error.type == "rate_limit_error" else "server_error"
        response = {
            **self._response(self._answer, "failed"),
            "error": {"code": code, "message": error.message},
            "output": self._items(self._answer.blocks),
        }
        return self._event("response.failed", response=response)

    def _response(self, answer: BlockAnswer, status: str) -> dict[str, Any]:
        return {
            **self._shared,
            "model": answer.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _items(self, blocks: Sequence[Block]) -> list[dict[str, Any]]:
        return [self._item(block, _status(block)) for block in blocks]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block as an output item; one that is in progress has only begun."""
        has_begun = status == "in_progress"
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        parts = [] if has_begun else [self._part(block)]
        match block.kind:
            case BlockKind.REASONING:
                return {"type": "reasoning", **item, "summary": [], "content": parts}
            case BlockKind.TEXT:
                return {"type": "message", **item, "role": "assistant", "content": parts}
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        if block.name in self._namespaces:
            call["namespace"] = self._namespaces[block.name]
        return {"type": "function_call", **item, **call}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        part = {"type": "output_text", "text": block.text, "annotations": []}
        return {**part, **self._logprobs(block, block.logprobs)}

    def _logprobs(self, block: Block, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the field that texts have and others do not."""
        if block.kind is not BlockKind.TEXT:
            return {}
        if not self._wants_logprobs:
            return {"logprobs": []}
        return {"logprobs": orjson.loads(chat_entries_json(entries))}

    def _id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._request_id}_{block.index}"

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\ndata: {to_json(event)}\n\n"


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
