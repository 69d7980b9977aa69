"""Several prompts of one completion: their generations as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from services.frontend.openai.request_body import MAX_VIOLATIONS
from triptych.errors import InvalidRequest
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.outputs import StageTimings, Usage


async def merge(streams: Sequence[AsyncGenerator[Event]], num_choices: int) -> AsyncGenerator[Event]:
    """One AdmittedEvent once all are admitted, then the deltas as they come, then one FinishedEvent.

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
    num_admitted = 0
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
                    num_admitted += 1
                    if num_admitted == len(streams):
                        yield event
                        for turn in turns:
                            turn.set()
                case InvalidRequest() if num_admitted < len(streams):
                    refusals[number] = event
                case FinishedEvent():
                    ends.append(event)
                    turns[number].set()
                case _:
                    raise event
            if refusals and num_admitted + len(refusals) == len(streams):
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
    """What is wrong with any of the prompts. What they have in common is reported once."""
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
        ),
        timings=slowest.timings,
        tokenize_ns=sum(end.tokenize_ns for end in ends),
    )


def _total_ns(timings: StageTimings) -> int:
    return timings.queued_ns + timings.prefill_ns + timings.decode_ns
