"""Answers requests whose answers are blocks, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from triptych_services.frontend.http.errors import HttpError, json_response
from triptych_services.frontend.http.sse import EventStream, with_notes
from triptych_services.frontend.http.state import generator_of
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.blocks import BlockAnswer, EventFormat, stream_blocks, whole_blocks


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
    events, in_flight = generator_of(request).generate(raw), request.app.state.in_flight
    notes = dict[str, str]()
    if raw.has_schema:
        events = with_notes(events, notes)
    if not is_streamed:
        whole = await in_flight.run(request.receive, whole_blocks(events))
        return json_response(format.whole(whole), headers=notes)
    return EventStream(
        stream_blocks(events, format),
        in_flight=in_flight,
        request_id=request.state.request_id,
        failure=format.failure,
        notes=notes,
    )
