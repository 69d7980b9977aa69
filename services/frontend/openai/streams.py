"""Streams of a completion: the generations of several prompts as one, and their events as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import astuple, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
from triptych_services.frontend.openai.connections import CUT
from triptych_services.frontend.openai.convert import AnswerOptions
from triptych_services.frontend.openai.errors import HttpError, to_http_error
from triptych_services.frontend.openai.in_flight import ClientGone, InFlight
from triptych_services.frontend.openai.objects import (
    AnswerFormat,
    running_usage,
    system_fingerprint,
    to_json,
    usage_object,
)
from triptych_services.frontend.openai.request_body import MAX_VIOLATIONS
from triptych_services.frontend.outputs import HandedOver
from triptych_services.frontend.resumption import SeenChoice


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


NOT_ENFORCED_HEADER = "X-Not-Enforced"
"""Paths of what the request's JSON schemas ask for and the answer is not held to, as a JSON list."""
_MAX_NOTED, _MAX_NOTE_CHARS = 16, 200  # what is said of one answer


async def with_notes(events: AsyncGenerator[Event], notes: dict[str, str]) -> AsyncGenerator[Event]:
    """Yield the events, and write headers that admission brings into `notes`."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AdmittedEvent) and event.not_enforced:
                shown = [place[:_MAX_NOTE_CHARS] for place in event.not_enforced[:_MAX_NOTED]]
                notes[NOT_ENFORCED_HEADER] = to_json(shown)
            yield event


BLANK_LINE = b"\n"
"""Keeps a silent stream open that has no event ids: every reader skips a blank line between two events, while those of
vLLM's and SGLang's benchmarks take a comment for data."""
COMMENT_LINE = b": ping\n"
"""The same where events have ids: the official openai client takes a blank line behind an id for an empty event."""
DONE = "data: [DONE]\n\n"


class StreamIds:
    """The ids of a stream's events: its token, and the output tokens of each choice that a client has by then."""

    def __init__(self, num_choices: int, seen: Mapping[int, SeenChoice] | None = None) -> None:
        """`seen`: What a client has that goes on with a stream. None: nothing, not even its opening."""
        self.is_resumed = seen is not None
        self._token = ""
        seen = seen or {}
        choices = [seen.get(index, _NOTHING) for index in range(num_choices)]
        self._counts = [choice.num_tokens for choice in choices]
        self._positions = [_position(*astuple(choice)) for choice in choices]

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client has."""
        return sum(self._counts)

    @property
    def open_choice(self) -> int:
        """Index of a choice that the client has not seen end."""
        return next(index for index, place in enumerate(self._positions) if not place.endswith(_FINISHED))

    def set_token(self, token: str) -> None:
        """Take the token by which the stream goes on; empty: it does not."""
        self._token = token

    def line(self) -> str:
        """Return the id of an event that changes no position; empty if the stream cannot go on elsewhere."""
        return f"id: {self._token}:{'.'.join(self._positions)}\n" if self._token else ""

    def advance(self, delta: DeltaEvent) -> str:
        """Return the id of the event that brings this delta."""
        index = delta.index
        self._counts[index] += len(delta.token_ids)
        self._positions[index] = _position(self._counts[index], delta.finish_reason is not None)
        return self.line()


_NOTHING = SeenChoice()
_FINISHED = "f"


def _position(num_tokens: int, is_finished: bool) -> str:
    return f"{num_tokens}{_FINISHED}" if is_finished else str(num_tokens)


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
                    shared = {
                        "id": answer_id,
                        "object": format.chunk_name,
                        "created": created_unix_s,
                        "model": event.model,
                        "system_fingerprint": system_fingerprint(event.fingerprint),
                    }
                    head = f'data: {to_json(shared)[:-1]},"choices":['
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


def _error_event(error: HttpError) -> str:
    return f"data: {to_json(error.body)}\n\n"


class _Pings:
    """Lines without data in a stream that has said nothing for a while: proxies close what looks idle."""

    def __init__(self, send: Send, line: bytes, interval_s: float) -> None:
        """`interval_s`: 0: none are sent."""
        self._send = send
        self._line = line
        self._interval_s = interval_s
        self._now = asyncio.get_running_loop().time
        self._sent_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Called when the answer has begun."""
        if self._interval_s:
            self._task = asyncio.create_task(self._run(), name="pings")

    def note_sent(self) -> None:
        """A chunk is about to be sent."""
        self._sent_at = self._now()

    async def aclose(self) -> None:
        """Send no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            wait_s = self._sent_at + self._interval_s - self._now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            self.note_sent()
            await self._send({"type": "http.response.body", "body": self._line, "more_body": True})


class EventStream(Response):
    """Sends chunks until they end, its client leaves, or something fails.

    A failure before the first chunk is a plain HTTP error; one after it is an event, and the last: no `[DONE]`
    follows, for the answer is not complete. A stream that is handed over breaks off without an event, since its client
    goes on elsewhere as it does when a server dies.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[str],
        *,
        in_flight: InFlight,
        request_id: str,
        failure: Callable[[HttpError], str] = _error_event,
        ping: bytes = BLANK_LINE,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            failure: Spells the event of a failure.
            ping: What is sent after a while without an event.
            notes: More headers, read when the first chunk is there.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._in_flight = in_flight
        self._request_id = request_id
        self._failure = failure
        self._ping = ping
        self._notes = {} if notes is None else notes
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(receive, self._send_all(send, scope["app"].state.ping_interval_s))
        except ClientGone:
            return
        except HandedOver:
            if not self._has_started:
                raise
            scope["extensions"][CUT]["cut"]()
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            if not self._has_started:
                raise
            event = self._failure(to_http_error(error, self._request_id))
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})

    async def _send_all(self, send: Send, ping_interval_s: float) -> None:
        pings = _Pings(send, self._ping, ping_interval_s)
        async with aclosing(self._chunks), aclosing(pings):
            async for chunk in self._chunks:
                if not self._has_started:
                    self.headers.update(self._notes)
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                    self._has_started = True
                    pings.start()
                pings.note_sent()
                await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
