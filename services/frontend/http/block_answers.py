"""Answers requests whose answers are blocks, one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from triptych.types.events import Event
from triptych_services.frontend.http.errors import HttpError, json_response
from triptych_services.frontend.http.sse import EventStream, with_notes
from triptych_services.frontend.http.state import generator_of
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.blocks import BlockAnswer, BlockEncoder, EventFormat, whole_blocks
from triptych_services.frontend.streams.outputs import EventReceiver


class BlockFormat(EventFormat, Protocol):
    """How an API spells its answers. One object per request."""

    answer_id: str

    def whole(self, answer: BlockAnswer) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    def failure(self, error: HttpError) -> str:
        """The last event of a stream that has failed."""


async def answer_in_blocks(
    request: Request, raw: RawRequest, format: BlockFormat, *, is_streamed: bool
) -> Response:
    """Generate, and answer in the API's own words."""
    raw = replace(raw, client_names=(*raw.client_names, format.answer_id))
    generator, in_flight = generator_of(request), request.app.state.in_flight
    notes = dict[str, str]()

    def generate(receiver: EventReceiver | None = None) -> AsyncGenerator[Event]:
        events = generator.generate(raw, receiver)
        return with_notes(events, notes) if raw.has_schema else events

    if not is_streamed:
        whole = await in_flight.run(request.receive, whole_blocks(generate()))
        return json_response(format.whole(whole), headers=notes)
    return EventStream(
        generate,
        BlockEncoder(format).encode,
        in_flight=in_flight,
        request_id=request.state.request_id,
        failure=format.failure,
        notes=notes,
    )
