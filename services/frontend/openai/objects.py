"""Events -> OpenAI's JSON objects: choices, log-probabilities, usage, and the chunks of a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from triptych.types.events import AdmittedEvent, DeltaEvent, Event, PromptLogprobsEvent
from triptych.types.outputs import (
    FinishReason,
    Logprob,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
    append_calls,
)


def to_json(value: Any) -> str:
    """Compact and pure ASCII, so that no character that a client sent can fail to be sent back."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


@dataclass(slots=True)
class Choice:
    """One whole choice; grows by deltas."""

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: DeltaEvent) -> None:
        self.texts.append(delta.text)
        self.reasonings.append(delta.reasoning)
        append_calls(self.tool_calls, delta.tool_calls)
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class AnswerFormat(Protocol):
    """How one endpoint spells its answers. One object per HTTP request."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def opening(self, index: int) -> str | None:
        """JSON of the choice in the chunk that opens it, if it is opened by one."""

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        """Take in a part of a prompt's log-probabilities; all of them come before the first delta."""

    def delta(self, delta: DeltaEvent) -> str:
        """JSON of the choice in a later chunk."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *, wants_logprobs: bool, num_choices: int = 1) -> None:
        """
        Args:
            num_choices: Of each prompt.
        """
        self._wants_logprobs = wants_logprobs
        self._num_choices = num_choices
        self._text_offsets: dict[int, int] = {}  # choice -> characters of its tokens so far
        self._prompts: dict[int, EchoLogprobs] = {}  # by the first choice of each that is repeated with them

    def opening(self, index: int) -> str | None:
        return None

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        if event.index not in self._prompts:
            self._prompts[event.index] = EchoLogprobs(event.first_token_bytes)
        self._prompts[event.index].add(event)

    def delta(self, delta: DeltaEvent) -> str:
        logprobs = self._logprobs(delta.index, delta.logprobs, delta.text) if self._wants_logprobs else None
        return (
            f'{{"index":{delta.index},"text":{json.dumps(delta.text)},'
            f'"logprobs":{to_json(logprobs) if logprobs else "null"},{_ending(delta)}}}'
        )

    def whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice.index, choice.logprobs, text) if self._wants_logprobs else None,
            **_ending_of(choice),
        }

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """`text`: What the choice has new; its first begins with the prompt that it repeats."""
        prompt = None
        if index not in self._text_offsets:
            prompt = self._prompts.get(index - index % self._num_choices)
        offsets, offset = ([], self._text_offsets.get(index, 0)) if prompt is None else prompt.place_in(text)
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.chosen.text)
        self._text_offsets[index] = offset
        tokens = [_name(entry.chosen) for entry in entries]
        token_logprobs: list[float | None] = [finite(entry.chosen.logprob) for entry in entries]
        top_logprobs: list[dict[str, float] | None] = [
            {_name(candidate): finite(candidate.logprob) for candidate in (entry.chosen, *entry.top)}
            for entry in entries
        ]
        if prompt is not None:
            tokens = prompt.tokens + tokens
            token_logprobs = prompt.token_logprobs + token_logprobs
            top_logprobs = prompt.top_logprobs + top_logprobs
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, *, wants_logprobs: bool) -> None:
        self._wants_logprobs = wants_logprobs

    def opening(self, index: int) -> str | None:
        return (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def add_prompt(self, event: PromptLogprobsEvent) -> None:
        raise NotImplementedError("a chat does not repeat its prompt")

    def delta(self, delta: DeltaEvent) -> str:
        content = f'{{"content":{json.dumps(delta.text)}}}' if delta.text else "{}"
        if delta.reasoning or delta.tool_calls:
            content = to_json(_chat_delta(delta))
        logprobs = to_json(_chat_logprobs(delta.logprobs)) if self._wants_logprobs else "null"
        return f'{{"index":{delta.index},"delta":{content},"logprobs":{logprobs},{_ending(delta)}}}'

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": _chat_logprobs(choice.logprobs) if self._wants_logprobs else None,
            **_ending_of(choice),
        }


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


def _message(choice: Choice) -> dict[str, Any]:
    text, reasoning = "".join(choice.texts), "".join(choice.reasonings)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.tool_calls:
        message["content"] = text or None
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
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    model, usage = "", Usage()
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
                    model = event.model
                case _:
                    usage = event.usage
    return {
        "id": answer_id,
        "object": format.object_name,
        "created": created_unix_s,
        "model": model,
        "choices": [format.whole(choice) for _, choice in sorted(choices.items())],
        "usage": usage_object(usage),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _ending(delta: DeltaEvent) -> str:
    if delta.finish_reason is None:
        return '"finish_reason":null'
    return to_json(_ending_of(delta))[1:-1]


def _ending_of(choice: Choice | DeltaEvent) -> dict[str, Any]:
    """Return why a choice has ended, in words that OpenAI has: its typed clients fail at others."""
    reason = choice.finish_reason
    if reason is FinishReason.ABORT:
        return {"finish_reason": FinishReason.LENGTH.word, "stop_reason": FinishReason.ABORT.word}
    return {"finish_reason": reason and reason.word, "stop_reason": choice.stop_reason}


def _chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_candidate(entry.chosen),
                "top_logprobs": [_candidate(top) for top in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _name(entry: Logprob) -> str:
    return entry.text if entry.token_bytes is None else spell(entry.token_bytes)


def _candidate(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite(entry.logprob), "bytes": list(entry.utf8)}


LOWEST_LOGPROB = -9999.0  # represents minus infinity, which JSON lacks; as OpenAI does
_SEARCHED_CHARS = 64


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can spell."""
    return max(logprob, LOWEST_LOGPROB)


def spell(token_bytes: bytes) -> str:
    """Return a token's text, or its bytes in OpenAI's spelling: parts of characters differ in these only."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class EchoLogprobs:
    """One prompt's tokens; grows by parts, then is shared by all choices."""

    def __init__(self, first_token_bytes: bytes) -> None:
        self._pieces = [first_token_bytes]
        self.token_logprobs: list[float | None] = [None]
        """[num_prompt_tokens] None for the first token: nothing predicts it."""
        self.top_logprobs: list[dict[str, float] | None] = [None]

    @property
    def tokens(self) -> list[str]:
        """[num_prompt_tokens] as `spell` has them."""
        return list(map(spell, self._pieces))

    def add(self, event: PromptLogprobsEvent) -> None:
        """Append the next part."""
        num_candidates = event.logprobs.token_ids.shape[1]
        self._pieces += event.token_bytes[::num_candidates]
        names = list(map(spell, event.token_bytes))
        for row, logprobs in enumerate(event.logprobs.logprobs.tolist()):
            start = row * num_candidates
            values = list(map(finite, logprobs))
            self.token_logprobs.append(values[0])
            self.top_logprobs.append(dict(zip(names[start : start + num_candidates], values, strict=True)))

    def place_in(self, text: str) -> tuple[list[int], int]:
        """Find where each token begins in a text that begins with the prompt; return that, and where the prompt ends.

        A token that the text leaves out, as special ones are, begins where the next one does. One that begins inside a
        character begins where that character does.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, offset = [], 0
        for piece in map(decoder.decode, self._pieces):
            offsets.append(offset)
            if not offset and not text.startswith(piece):
                piece = piece.removeprefix(" ")  # some tokenizers put a space before every text
            place = text.find(piece, offset, offset + len(piece) + _SEARCHED_CHARS)  # normalised texts differ
            if place >= 0:
                offset = place + len(piece)
        return offsets, offset
