"""Chunks of OpenAI's streams: the generations of several prompts as one, and their events as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from triptych.errors import InvalidRequest
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.outputs import StageTimings, Usage
from triptych_services.frontend.generate import Generator
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
from triptych_services.frontend.streams.attached import AttachedEvent
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

_FORMATS: Mapping[str, type[ChatFormat] | type[CompletionFormat]] = {
    "chat": ChatFormat,
    "completion": CompletionFormat,
}
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
    """Tokens add up; times are those of the slowest."""
    slowest = max(ends, key=lambda end: _total_ns(end.timings))
    return FinishedEvent(
        usage=Usage(
            sum(end.usage.num_prompt_tokens for end in ends),
            sum(end.usage.num_output_tokens for end in ends),
            sum(end.usage.num_cached_tokens for end in ends),
            sum(end.usage.num_reasoning_tokens for end in ends),
        ),
        timings=slowest.timings,
        tokenize_ns=sum(end.tokenize_ns for end in ends),
        num_moves=max(end.num_moves for end in ends),
        is_exact=all(end.is_exact for end in ends),
    )


def _total_ns(timings: StageTimings) -> int:
    return timings.queued_ns + timings.prefill_ns + timings.decode_ns


async def chunks(
    events: AsyncGenerator[Event],
    format: AnswerFormat,
    *,
    answer_id: str,
    created_unix_s: int,
    options: AnswerOptions,
    ids: StreamIds | None = None,
) -> AsyncGenerator[str]:
    """The text of the stream, in pieces to be sent at once. The first comes with admission and may be empty.

    Nothing is done twice per chunk: what all chunks share is written once, on admission.

    Args:
        ids: Of its events. None: they have none.
    """
    async with aclosing(events):
        head = tail = event_id = ""
        num_prompt, num_output = 0, 0 if ids is None else ids.num_tokens
        async for event in events:
            match event:
                case DeltaEvent():
                    if ids is not None:
                        event_id = ids.advance(event)
                    if options.has_running_usage:
                        num_output += len(event.token_ids)
                        tail = _usage_tail(running_usage(num_prompt, num_output))
                    has_output = event.text or event.reasoning or event.tool_calls or event.logprobs
                    has_tokens = options.returns_token_ids and event.token_ids
                    if has_output or has_tokens or event.finish_reason is not None:
                        yield f"{event_id}{head}{format.delta(event)}{tail}"
                case PromptLogprobsEvent():
                    format.add_prompt(event)
                case AdmittedEvent():
                    format.admit(event)
                    num_prompt += len(event.prompt_token_ids)
                    if head:
                        continue
                    if ids is not None:
                        ids.set_token(event.resume_token)
                        event_id = ids.line()
                    head = _head(format, answer_id, created_unix_s, event)
                    tail = _usage_tail(None) if options.includes_usage else "]}\n\n"
                    if options.has_running_usage:
                        tail = _usage_tail(running_usage(num_prompt, num_output))
                    if ids is not None and ids.is_resumed:
                        yield ""
                        continue
                    yield _opening_chunks(format, options.num_choices, event_id, head, tail)
                case ResumableEvent():
                    if ids is not None:
                        ids.set_token(event.resume_token)
                        if event_id := ids.line():
                            yield f"{event_id}{head}{format.nothing(ids.open_choice)}{tail}"
                case _:
                    yield (head + _usage_tail(usage_object(event)) + DONE if options.includes_usage else DONE)


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
    name = next(name for name, kind in _FORMATS.items() if type(format) is kind)
    written = asdict(options)
    del written["has_content"]  # it matters to the opening alone, and the version before does not know it
    return {"format": name, "options": written, "id": answer_id, "created": created_unix_s}


async def rest_of(
    generator: Generator, token: ResumeToken, seen: Mapping[int, SeenChoice] | None
) -> AsyncGenerator[str]:
    """Yield the text of a stream from where its client is.

    Args:
        seen: What the client has of each choice. None: not even the stream's beginning.
    """
    async with aclosing(generator.attach(token, seen or {}, "http")) as events:
        attached = await anext(events)
        assert isinstance(attached, AttachedEvent), "the first event says how the others are sent"
        answer = attached.state.answer
        options = AnswerOptions(**answer["options"])
        format = _FORMATS[answer["format"]](options)
        token_bytes = generator.text_model.tokenizer.token_bytes
        for index, token_ids in attached.seen_token_ids.items():
            format.skip(index, map(token_bytes, token_ids))
        pieces = chunks(
            events,  # type: ignore[arg-type]  # the first one is taken
            format,
            answer_id=answer["id"],
            created_unix_s=answer["created"],
            options=options,
            ids=StreamIds(options.num_choices, seen),
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
