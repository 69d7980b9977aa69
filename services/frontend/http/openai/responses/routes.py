"""The route POST /v1/responses."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_services.frontend.http.answers import GENERATE_ERRORS
from triptych_services.frontend.http.blocks import answer_in_blocks
from triptych_services.frontend.http.document import takes
from triptych_services.frontend.http.generation import timeout_of
from triptych_services.frontend.http.openai.responses import convert
from triptych_services.frontend.http.openai.responses.answers import RESPONSES_EVENTS, ResponseAnswer
from triptych_services.frontend.http.openai.responses.objects import ResponsesFormat
from triptych_services.frontend.http.openai.responses.schema import ResponsesRequest
from triptych_services.frontend.http.state import reader_of
from triptych_services.frontend.requests.raw import with_remaining_time

router = APIRouter(responses=GENERATE_ERRORS, tags=["generate"])


@router.post("/v1/responses", responses={200: {"model": ResponseAnswer}})
@takes(ResponsesRequest, events=RESPONSES_EVENTS)
async def create_response(request: Request) -> Response:
    """Answer a conversation, as OpenAI's Responses API does. Nothing is stored."""
    request_id: str = request.state.request_id
    arrived, deadline_s = time.monotonic(), timeout_of(request)
    to_raw = partial(convert.read_response, label=request_id, deadline_s=deadline_s)
    options, raw = await reader_of(request).read(request, ResponsesRequest, to_raw, deadline_s=deadline_s)
    format = ResponsesFormat(
        request_id=request_id,
        created_unix_s=int(time.time()),
        repeated=options.repeated,
        wants_logprobs=options.wants_logprobs,
        namespaces=options.namespaces,
    )
    if deadline_s is not None:
        raw = with_remaining_time(raw, arrived)
    return await answer_in_blocks(request, raw, format, is_streamed=options.is_streamed)
