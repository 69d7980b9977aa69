"""Chunks of OpenAI's streams: the generations of several prompts as one, and their events as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from triptych.errors import InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.outputs import StageTimings, Usage
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.body import MAX_VIOLATIONS
from triptych_services.frontend.http.openai.convert import AnswerOptions
from triptych_services.frontend.http.openai.event_ids import StreamIds
from triptych_services.frontend.http.openai.objects import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    running_usage,
    system_fingerprint,
    usage_object,
)
from triptych_services.frontend.streams.placement import AttachedEvent
from triptych_services.frontend.streams.resume import SeenChoice

_CHAT, _COMPLETION = "chat", "completion"
_SKIPS_SPECIAL_TOKENS = "skips_special_tokens"
DONE = "data: [DONE]\n\n"


async def merge(streams: Sequence[AsyncGenerator[Event]], num_choices: int) -> AsyncGenerator[Event]:
    """All AdmittedEvents once all are admitted, then the deltas as they come, then one FinishedEvent.

    Choice j of stream i becomes choice i * num_choices + j. Streams take turns: each is asked for its next
    event when its last one has been read, so a slow reader finds deltas merged as with one prompt, and
    none waits behind another's. The first error ends all. Prompts that are refused as invalid are reported
    together, once all others are admitted.
    """
    events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()  # at most one of each stream
    turns = [asyncio.Event() for _ in streams]
    pumps = [
        asyncio.create_task(_pump(number, stream, events, turns[number]), name=f"prompt-{number}")
        for number, stream in enumerate(streams)
    ]
    admitted: dict[int, AdmittedEvent] = {}
    refusals: dict[int, InvalidRequest] = {}
    ends: list[FinishedEvent] = []
    try:
        while len(ends) < len(streams):
            number, event = await events.get()
            match event:
                case DeltaEvent() | PromptLogprobsEvent():
                    yield replace(event, index=number * num_choices + event.index)
                    turns[number].set()
                case AdmittedEvent():
                    admitted[number] = replace(event, index=number * num_choices)
                    if len(admitted) == len(streams):
                        for _, event in sorted(admitted.items()):
                            yield event
                        for turn in turns:
                            turn.set()
                case InvalidRequest() if len(admitted) < len(streams):
                    refusals[number] = event
                case FinishedEvent():
                    ends.append(event)
                    turns[number].set()
                case ResumableEvent():
                    turns[number].set()  # it is of one prompt, and the stream of several goes on nowhere else
                case _:
                    raise event
            if refusals and len(admitted) + len(refusals) == len(streams):
                raise _together([refusal for _, refusal in sorted(refusals.items())])
        yield _sum(ends)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    number: int,
    stream: AsyncGenerator[Event],
    events: asyncio.Queue[tuple[int, Event | Exception]],
    turn: asyncio.Event,
) -> None:
    try:
        async with aclosing(stream):
            async for event in stream:
                events.put_nowait((number, event))
                await turn.wait()
                turn.clear()
    except Exception as error:
        events.put_nowait((number, error))


def _together(refusals: Sequence[InvalidRequest]) -> InvalidRequest:
    """Join the refusals of several prompts into one error; equal violations are reported once."""
    if len(refusals) == 1:
        return refusals[0]
    kinds = {type(refusal) for refusal in refusals}
    kind = kinds.pop() if len(kinds) == 1 else InvalidRequest
    violations = list(dict.fromkeys(v for refusal in refusals for v in refusal.violations))
    return kind(violations[:MAX_VIOLATIONS])


def _sum(ends: Sequence[FinishedEvent]) -> FinishedEvent:
    """Return one end: tokens add up, and times are those of the slowest."""
    return FinishedEvent(
        usage=Usage(
            sum(end.usage.num_prompt_tokens for end in ends),
            sum(end.usage.num_output_tokens for end in ends),
            sum(end.usage.num_cached_tokens for end in ends),
            sum(end.usage.num_reasoning_tokens for end in ends),
        ),
        timings=StageTimings.of_all([end.timings for end in ends]),
        tokenize_ns=sum(end.tokenize_ns for end in ends),
        num_moves=max(end.num_moves for end in ends),
        is_exact=all(end.is_exact for end in ends),
    )


class ChunkEncoder:
    """Writes the events of one stream as chunks. What all chunks share is written once, on admission."""

    def __init__(
        self,
        format: AnswerFormat,
        *,
        answer_id: str,
        created_unix_s: int,
        options: AnswerOptions,
        ids: StreamIds | None = None,
    ) -> None:
        """`ids`: of its events. None: they have none."""
        self._format = format
        self._answer_id = answer_id
        self._created_unix_s = created_unix_s
        self._options = options
        self._ids = ids
        self._head = self._tail = self._event_id = ""
        self._num_prompt = 0
        self._num_output = 0 if ids is None else ids.num_tokens

    def encode(self, event: Event) -> str:
        """Return what is sent of an event, at once; perhaps nothing."""
        match event:
            case DeltaEvent():
                return self._delta(event)
            case PromptLogprobsEvent():
                self._format.add_prompt(event)
                return ""
            case AdmittedEvent():
                return self._admit(event)
            case ResumableEvent():
                return self._resumable(event)
        if not self._options.includes_usage:
            return DONE
        return self._head + _usage_tail(usage_object(event)) + DONE

    def _delta(self, event: DeltaEvent) -> str:
        if self._ids is not None:
            self._event_id = self._ids.advance(event)
        if self._options.has_running_usage:
            self._num_output += len(event.token_ids)
            self._tail = _usage_tail(running_usage(self._num_prompt, self._num_output))
        has_output = event.text or event.reasoning or event.tool_calls or event.logprobs
        has_tokens = self._options.returns_token_ids and event.token_ids
        if has_output or has_tokens or event.finish_reason is not None:
            return f"{self._event_id}{self._head}{self._format.delta(event)}{self._tail}"
        return ""

    def _admit(self, event: AdmittedEvent) -> str:
        format, options, ids = self._format, self._options, self._ids
        format.admit(event)
        self._num_prompt += len(event.prompt_token_ids)
        if self._head:
            return ""
        if ids is not None:
            ids.set_token(event.resume_token)
            self._event_id = ids.line()
        self._head = _head(format, self._answer_id, self._created_unix_s, event)
        self._tail = _usage_tail(None) if options.includes_usage else "]}\n\n"
        if options.has_running_usage:
            self._tail = _usage_tail(running_usage(self._num_prompt, self._num_output))
        if ids is not None and ids.is_resumed:
            return ""
        return _opening_chunks(format, options.num_choices, self._event_id, self._head, self._tail)

    def _resumable(self, event: ResumableEvent) -> str:
        if self._ids is None:
            return ""
        self._ids.set_token(event.resume_token)
        self._event_id = self._ids.line()
        if not self._event_id:
            return ""
        return f"{self._event_id}{self._head}{self._format.nothing(self._ids.open_choice)}{self._tail}"


def _head(format: AnswerFormat, answer_id: str, created_unix_s: int, event: AdmittedEvent) -> str:
    """Return the beginning of each chunk, up to its choices."""
    shared = {
        "id": answer_id,
        "object": format.chunk_name,
        "created": created_unix_s,
        "model": event.model,
        "system_fingerprint": system_fingerprint(event.fingerprint),
    }
    return f'data: {to_json(shared)[:-1]},"choices":['


def _opening_chunks(format: AnswerFormat, num_choices: int, event_id: str, head: str, tail: str) -> str:
    """Return the chunks that open the choices; the last has the id, with which the client has all of them."""
    prompt_fields = "".join(f',"{name}":{to_json(value)}' for name, value in format.prompt_fields().items())
    openings = (format.opening(index) for index in range(num_choices))
    opened = [f"{head}{opening}]{prompt_fields}{tail[1:]}" for opening in openings if opening is not None]
    if not opened and event_id:  # so that the client has an id before the first output
        opened = [f"{head}{format.nothing(0)}{tail}"]
    if opened:
        opened[-1] = event_id + opened[-1]
    return "".join(opened)


def _usage_tail(usage: Mapping[str, Any] | None) -> str:
    """Return the end of a chunk behind its choices."""
    return f'],"usage":{to_json(usage)}}}\n\n'


def write_answer(
    format: AnswerFormat, options: AnswerOptions, answer_id: str, created_unix_s: int
) -> dict[str, Any]:
    """Return what another frontend must know to send the rest of a streamed answer."""
    name = _CHAT if isinstance(format, ChatFormat) else _COMPLETION
    written = asdict(options)
    del written["has_content"]  # it matters to the opening alone, and the version before does not know it
    skips = written.pop(_SKIPS_SPECIAL_TOKENS)  # that version passes over it here
    return {
        "format": name,
        "options": written,
        _SKIPS_SPECIAL_TOKENS: skips,
        "id": answer_id,
        "created": created_unix_s,
    }


class RestEncoder:
    """Writes the rest of a stream that began at another frontend, as its first event says that it was written."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], seen: Mapping[int, SeenChoice] | None) -> None:
        """
        Args:
            tokenizer: See `CompletionFormat`.
            seen: What the client has of each choice. None: not even the stream's beginning.
        """
        self._tokenizer = tokenizer
        self._seen = seen
        self._chunks: ChunkEncoder | None = None

    def encode(self, event: AttachedEvent | Event) -> str:
        """As that of `ChunkEncoder`."""
        if not isinstance(event, AttachedEvent):
            assert self._chunks is not None, "the first event says how the others are sent"
            return self._chunks.encode(event)
        answer = event.state.answer
        skips = answer.get(_SKIPS_SPECIAL_TOKENS, True)
        options = AnswerOptions(**answer["options"], skips_special_tokens=skips)
        format: AnswerFormat = ChatFormat(options)
        if answer["format"] == _COMPLETION:
            format = CompletionFormat(options, self._tokenizer)
        for index, token_ids in event.seen_token_ids.items():
            format.skip(index, token_ids)
        self._chunks = ChunkEncoder(
            format,
            answer_id=answer["id"],
            created_unix_s=answer["created"],
            options=options,
            ids=StreamIds(options.num_choices, self._seen),
        )
        return ""
