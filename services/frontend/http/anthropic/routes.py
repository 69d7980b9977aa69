"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_services.frontend.http.answers import error_answers
from triptych_services.frontend.http.anthropic import convert
from triptych_services.frontend.http.anthropic.answers import (
    MESSAGES_EVENTS,
    AnthropicError,
    MessageAnswer,
    TokensCountAnswer,
)
from triptych_services.frontend.http.anthropic.objects import MessagesFormat
from triptych_services.frontend.http.anthropic.schema import CountTokensRequest, MessagesRequest
from triptych_services.frontend.http.blocks import answer_in_blocks
from triptych_services.frontend.http.document import takes
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.generation import timeout_of
from triptych_services.frontend.http.state import generator_of, reader_of
from triptych_services.frontend.requests.raw import with_remaining_time

router = APIRouter()
_GENERATE_ERRORS = error_answers(400, 403, 404, 413, 429, 503, 504, model=AnthropicError)
_COUNT_ERRORS = error_answers(400, 404, 413, 429, 503, model=AnthropicError)


@router.post("/v1/messages", responses={200: {"model": MessageAnswer}, **_GENERATE_ERRORS}, tags=["generate"])
@takes(MessagesRequest, events=MESSAGES_EVENTS)
async def create_message(request: Request) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    request_id: str = request.state.request_id
    arrived, deadline_s = time.monotonic(), timeout_of(request)
    to_raw = partial(convert.read_messages, label=request_id, deadline_s=deadline_s)
    is_streamed, raw = await reader_of(request).read(request, MessagesRequest, to_raw, deadline_s=deadline_s)
    if deadline_s is not None:
        raw = with_remaining_time(raw, arrived)
    return await answer_in_blocks(
        request, raw, MessagesFormat(request_id=request_id), is_streamed=is_streamed
    )


@router.post(
    "/v1/messages/count_tokens",
    responses={200: {"model": TokensCountAnswer}, **_COUNT_ERRORS},
    tags=["tokens"],
)
@takes(CountTokensRequest)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, as Anthropic's Messages API does."""
    model, chat = await reader_of(request).read(request, CountTokensRequest, convert.read_count)
    token_ids = await generator_of(request).text.tokenize(chat, model=model, paths=convert.CHAT_PATHS)
    return json_response({"input_tokens": len(token_ids)})
