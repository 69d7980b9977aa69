"""Server-sent events: sends the events of an answer that streams, until they end or its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.types.events import AdmittedEvent, Event, FinishedEvent
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.connections import CUT, WRITER, AnswerWriter
from triptych_services.frontend.http.errors import HttpError, to_http_error
from triptych_services.frontend.http.state import InFlight
from triptych_services.frontend.streams.outputs import EventReceiver, HandedOver

Encode: TypeAlias = Callable[[Any], str]
"""Returns the text of an event of a generation; empty: it has none."""

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


def _error_event(error: HttpError) -> str:
    return f"data: {to_json(error.body)}\n\n"


class _Pings:
    """Lines without data in a stream that has said nothing for a while: proxies close what looks idle."""

    def __init__(self, send: Send, line: bytes, interval_s: float) -> None:
        """`interval_s`: 0: none are sent."""
        self._send = send
        self._line = line
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Until the task is there: most streams end before the first line is due."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Called when the answer has begun."""
        self.note_sent()
        if self._interval_s:
            self._timer = self._loop.call_later(self._interval_s, self._start_task)

    def note_sent(self) -> None:
        """A chunk is about to be sent."""
        self._sent_at = self._now()

    async def aclose(self) -> None:
        """Send no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start_task(self) -> None:
        self._task = asyncio.create_task(self._run(), name="pings")

    async def _run(self) -> None:
        while True:
            wait_s = self._sent_at + self._interval_s - self._now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            self.note_sent()
            await self._send({"type": "http.response.body", "body": self._line, "more_body": True})


class _Pieces:
    """Receives the events of a stream, and writes them straight into its connection."""

    def __init__(self, writer: AnswerWriter, encode: Encode, pings: _Pings) -> None:
        self.on_ready: Callable[[], None] = _do_nothing
        self._writer = writer
        self._encode = encode
        self._pings = pings
        writer.on_writable(self._on_writable)

    @property
    def is_ready(self) -> bool:
        """See `EventReceiver`."""
        return self._writer.is_writable

    def take(self, event: Event) -> None:
        """See `EventReceiver`."""
        if piece := self._encode(event):
            self._pings.note_sent()
            self._writer.write(piece.encode())

    def close(self) -> None:
        """Take no more."""
        self._writer.on_writable(None)

    def _on_writable(self) -> None:
        self.on_ready()


def _do_nothing() -> None:
    pass


class EventStream(Response):
    """Sends a generation's events until they end, its client leaves, or something fails.

    A failure before the first event is a plain HTTP error; one after it is an event, and the last: no `[DONE]`
    follows, for the answer is not complete. A stream that is handed over breaks off without an event, since its client
    goes on elsewhere as it does when a server dies.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generate: Callable[[EventReceiver | None], AsyncGenerator[Event]],
        encode: Encode,
        *,
        in_flight: InFlight,
        request_id: str,
        failure: Callable[[HttpError], str] = _error_event,
        ping: bytes = BLANK_LINE,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            generate: Begins the generation. It may leave all events between the first and the last to the receiver.
            encode: Returns the text of an event; empty: it has none.
            failure: Spells the event of a failure.
            ping: What is sent after a while without an event.
            notes: More headers, read when the first event is there.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generate = generate
        self._encode = encode
        self._in_flight = in_flight
        self._request_id = request_id
        self._failure = failure
        self._ping = ping
        self._notes = {} if notes is None else notes
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(receive, self._send_all(scope, send))
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

    async def _send_all(self, scope: Scope, send: Send) -> None:
        pings = _Pings(send, self._ping, scope["app"].state.ping_interval_s)
        writer: AnswerWriter | None = scope.get("extensions", {}).get(WRITER)
        pieces = None if writer is None else _Pieces(writer, self._encode, pings)
        try:
            async with aclosing(self._generate(pieces)) as events, aclosing(pings):
                async for event in events:
                    if not self._has_started:
                        await self._start(send)
                        pings.start()
                    piece, is_last = self._encode(event), isinstance(event, FinishedEvent)
                    if piece or is_last:
                        pings.note_sent()
                        body = {
                            "type": "http.response.body",
                            "body": piece.encode(),
                            "more_body": not is_last,
                        }
                        await send(body)
        finally:
            if pieces is not None:
                pieces.close()

    async def _start(self, send: Send) -> None:
        self.headers.update(self._notes)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._has_started = True
