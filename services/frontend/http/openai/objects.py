"""Events -> OpenAI's JSON objects: choices, log-probabilities, usage, and the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from triptych.text.tokenizer import Tokenizer
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.logprobs import LogprobRows, TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, ToolCall, ToolCallDelta, Usage, append_calls
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.openai.convert import AnswerOptions
from triptych_services.frontend.http.openai.logprobs import (
    EchoLogprobs,
    PromptLogprobsList,
    TextPlaces,
    chat_json,
    completion_json,
)

REPETITION_DETECTED = "repetition_detected"
"""The `stop_reason` of an output that repeated itself, as in vLLM."""


@dataclass(slots=True)
class Choice:
    """One whole choice; grows by deltas."""

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRows] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: DeltaEvent) -> None:
        self.texts.append(delta.text)
        self.reasonings.append(delta.reasoning)
        append_calls(self.tool_calls, delta.tool_calls)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs.append(LogprobRows.of(delta.logprobs))
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def rows(self) -> Sequence[TokenLogprobs]:
        """Log-probabilities of its tokens, if they were asked for."""
        return LogprobRows.joined(self.logprobs) if self.logprobs else ()


class AnswerFormat(Protocol):
    """How one endpoint spells its answers. One object per HTTP request."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def admit(self, event: AdmittedEvent) -> None:
        """Take in that a prompt is admitted; all prompts are before anything else comes."""

    def opening(self, index: int) -> str | None:
        """JSON of the choice in the chunk that opens it, if it is opened by one."""

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        """Take in a part of a prompt's log-probabilities; all of them come before the first delta."""

    def prompt_fields(self) -> dict[str, Any]:
        """Fields about the prompt in the answer itself, or in the chunks that open its choices."""

    def delta(self, delta: DeltaEvent) -> str:
        """JSON of the choice in a later chunk."""

    def nothing(self, index: int) -> str:
        """JSON of the choice in a chunk that brings no output, but an event id."""

    def whole(self, choice: Choice) -> str:
        """JSON of the choice in an answer that is not streamed."""

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        """Take in that the client has these tokens of a choice, before any delta."""


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, options: AnswerOptions, tokenizer: Callable[[], Tokenizer]) -> None:
        """`tokenizer`: Returns the model's, once a request is admitted."""
        self._options = options
        self._tokenizer = tokenizer
        self._places: dict[int, TextPlaces] = {}  # of the tokens of each choice, from its first one on
        # The rest by the first choice of each prompt.
        self._prompt_token_ids: dict[int, list[int]] = {}  # if they are needed
        self._echoes: dict[int, EchoLogprobs] = {}
        self._prompt_logprobs: dict[int, PromptLogprobsList] = {}
        self._are_open: set[int] = set()  # choices whose first chunk is sent

    def admit(self, event: AdmittedEvent) -> None:
        if self._options.returns_token_ids or self._options.echoes_logprobs:
            self._prompt_token_ids[event.index] = np.asarray(event.prompt_token_ids).tolist()

    def opening(self, index: int) -> str | None:
        return None

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        index = event.index
        if self._options.echoes_logprobs:
            if index not in self._echoes:
                first_token_id = self._prompt_token_ids[index][0]
                self._echoes[index] = EchoLogprobs(
                    first_token_id, event.first_token_bytes, names_by_id=self._options.names_tokens_by_id
                )
            self._echoes[index].add(event)
        if self._options.returns_prompt_logprobs:
            self._prompt_logprobs.setdefault(index, PromptLogprobsList()).add(event)

    def prompt_fields(self) -> dict[str, Any]:
        return {}

    def delta(self, delta: DeltaEvent) -> str:
        logprobs = self._logprobs(delta.index, delta.logprobs, delta.text)
        return (
            f'{{"index":{delta.index},"text":{json.dumps(delta.text)},'
            f'"logprobs":{logprobs}{self._token_ids(delta)},{_ending(delta)}}}'
        )

    def nothing(self, index: int) -> str:
        return f'{{"index":{index},"text":"","logprobs":null,"finish_reason":null}}'

    def _token_ids(self, delta: DeltaEvent) -> str:
        """Return the token ids of a chunk as more fields; in the first one of a choice the prompt's as well."""
        if not self._options.returns_token_ids:
            return ""
        prompt = ""
        if delta.index not in self._are_open:
            self._are_open.add(delta.index)
            prompt = f',"prompt_token_ids":{to_json(self._prompt_token_ids[self._first_choice(delta.index)])}'
        return f'{prompt},"token_ids":{to_json(delta.token_ids)}'

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        self._are_open.add(index)
        if self._options.wants_logprobs:
            places, token_bytes = self._new_places(), self._tokenizer().token_bytes
            for token_id in token_ids:
                places.add(token_id, token_bytes(token_id))
            self._places[index] = places

    def whole(self, choice: Choice) -> str:
        text = "".join(choice.texts)
        fields = {"index": choice.index, "text": text, **_ending_of(choice), **self._more_fields(choice)}
        return f'{to_json(fields)[:-1]},"logprobs":{self._logprobs(choice.index, choice.rows, text)}}}'

    def _more_fields(self, choice: Choice) -> dict[str, Any]:
        """Return what was asked for beyond OpenAI's fields."""
        first, fields = self._first_choice(choice.index), dict[str, Any]()
        if self._options.returns_prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs[first].positions
        if self._options.returns_token_ids:
            fields["prompt_token_ids"] = self._prompt_token_ids[first]
            fields["token_ids"] = choice.token_ids
        return fields

    def _first_choice(self, index: int) -> int:
        """Return the first choice of the same prompt."""
        return index - index % self._options.num_choices

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs], text: str) -> str:
        """`text`: What the choice has new; its first begins with the prompt that it repeats."""
        if not self._options.wants_logprobs:
            return "null"
        echo = None
        if index not in self._places:
            self._places[index], echo = self._new_places(), self._echoes.get(self._first_choice(index))
        names_by_id = self._options.names_tokens_by_id
        return completion_json(entries, self._places[index], echo, text, names_by_id=names_by_id)

    def _new_places(self) -> TextPlaces:
        return TextPlaces(self._tokenizer().special_ids if self._options.skips_special_tokens else ())


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs = PromptLogprobsList()

    def admit(self, event: AdmittedEvent) -> None:
        if self._options.returns_token_ids:
            self._prompt_token_ids = np.asarray(event.prompt_token_ids).tolist()

    def opening(self, index: int) -> str | None:
        content = '""' if self._options.has_content else "null"
        return (
            f'{{"index":{index},"delta":{{"role":"assistant","content":{content}}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        self._prompt_logprobs.add(event)

    def prompt_fields(self) -> dict[str, Any]:
        fields = dict[str, Any]()
        if self._options.returns_prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs.positions
        if self._options.returns_token_ids:
            fields["prompt_token_ids"] = self._prompt_token_ids
        return fields

    def delta(self, delta: DeltaEvent) -> str:
        content = f'{{"content":{json.dumps(delta.text)}}}' if delta.text else "{}"
        if delta.reasoning or delta.tool_calls:
            content = to_json(_chat_delta(delta))
        logprobs = self._logprobs(delta.logprobs)
        token_ids = f',"token_ids":{to_json(delta.token_ids)}' if self._options.returns_token_ids else ""
        return (
            f'{{"index":{delta.index},"delta":{content},"logprobs":{logprobs}{token_ids},{_ending(delta)}}}'
        )

    def nothing(self, index: int) -> str:
        return f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":null}}'

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        pass  # its chunks stand for themselves

    def whole(self, choice: Choice) -> str:
        fields = {
            "index": choice.index,
            "message": _message(choice, has_content=self._options.has_content),
            **_ending_of(choice),
            **({"token_ids": choice.token_ids} if self._options.returns_token_ids else {}),
        }
        return f'{to_json(fields)[:-1]},"logprobs":{self._logprobs(choice.rows)}}}'

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> str:
        if not self._options.wants_logprobs:
            return "null"
        return chat_json(entries, names_by_id=self._options.names_tokens_by_id)


def _chat_delta(delta: DeltaEvent) -> dict[str, Any]:
    new: dict[str, Any] = {}
    if delta.text:
        new["content"] = delta.text
    if delta.reasoning:
        new["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        new["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return new


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(choice: Choice, *, has_content: bool) -> dict[str, Any]:
    text, reasoning = "".join(choice.texts), "".join(choice.reasonings)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.tool_calls or not has_content:
        message["content"] = text or None
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.tool_calls
        ]
    return message


async def whole_answer(
    events: AsyncGenerator[Event], format: AnswerFormat, *, answer_id: str, created_unix_s: int
) -> str:
    """Return the JSON of the answer to a request that does not stream."""
    model, fingerprint = "", ""
    end = FinishedEvent(Usage(), StageTimings())
    choices: dict[int, Choice] = {}
    async with aclosing(events):
        async for event in events:
            match event:
                case DeltaEvent():
                    if event.index not in choices:
                        choices[event.index] = Choice(event.index)
                    choices[event.index].add(event)
                case PromptLogprobsEvent():
                    format.add_prompt(event)
                case AdmittedEvent():
                    model, fingerprint = event.model, event.fingerprint
                    format.admit(event)
                case FinishedEvent():
                    end = event
    fields = {
        "id": answer_id,
        "object": format.object_name,
        "created": created_unix_s,
        "model": model,
        "system_fingerprint": system_fingerprint(fingerprint),
        "usage": usage_object(end),
        **format.prompt_fields(),
    }
    objects = ",".join(format.whole(choice) for _, choice in sorted(choices.items()))
    return f'{to_json(fields)[:-1]},"choices":[{objects}]}}'


def usage_object(end: FinishedEvent) -> dict[str, Any]:
    """Return the counts at the end, with a note if the request has moved from one engine to another."""
    usage = end.usage
    moves = {"triptych": {"moves": end.num_moves, "exact": end.is_exact}} if end.num_moves else {}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": end.timings.num_accepted_guesses,
            "rejected_prediction_tokens": end.timings.num_rejected_guesses,
        },
        **moves,
    }


def running_usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Return the counts so far, in the chunks of a stream."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def system_fingerprint(fingerprint: str) -> str | None:
    """Return OpenAI's name of what a model is computed from, or None if it is not known."""
    return f"fp_{fingerprint[:12]}" if fingerprint else None


def _ending(delta: DeltaEvent) -> str:
    if delta.finish_reason is None:
        return '"finish_reason":null'
    return to_json(_ending_of(delta))[1:-1]


def _ending_of(choice: Choice | DeltaEvent) -> dict[str, Any]:
    """Return why a choice has ended, in words that OpenAI has: its typed clients fail at others."""
    reason = choice.finish_reason
    if reason is FinishReason.ABORT:
        return {"finish_reason": FinishReason.LENGTH.word, "stop_reason": FinishReason.ABORT.word}
    if reason is FinishReason.REPETITION:
        return {"finish_reason": FinishReason.LENGTH.word, "stop_reason": REPETITION_DETECTED}
    return {"finish_reason": reason and reason.word, "stop_reason": choice.stop_reason}
