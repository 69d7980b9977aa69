"""Routes that generate, and the models that they may name."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.errors import InvalidRequest, ModelNotFound, NotKept
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import Event
from triptych_services.frontend.generate import ServedModel
from triptych_services.frontend.http.answers import GENERATE_ERRORS, ErrorAnswer, error_answers
from triptych_services.frontend.http.document import takes
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.generation import names_to_abort, timeout_of
from triptych_services.frontend.http.generation_body import AbortRequest
from triptych_services.frontend.http.openai import answers, convert
from triptych_services.frontend.http.openai.event_ids import (
    LAST_EVENT_ID_HEADER,
    MAX_CHOICES_WITH_IDS,
    StreamIds,
    parse_event_id,
)
from triptych_services.frontend.http.openai.objects import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    whole_answer,
)
from triptych_services.frontend.http.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
)
from triptych_services.frontend.http.openai.streams import ChunkEncoder, RestEncoder, merge, write_answer
from triptych_services.frontend.http.sse import (
    BLANK_LINE,
    COMMENT_LINE,
    EventStream,
    with_notes,
)
from triptych_services.frontend.http.state import generator_of, reader_of
from triptych_services.frontend.requests.raw import RawRequest, with_remaining_time
from triptych_services.frontend.streams.outputs import EventReceiver
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

router = APIRouter()


@router.post(
    "/v1/completions",
    responses={200: {"model": answers.CompletionAnswer}, **GENERATE_ERRORS},
    tags=["generate"],
)
@takes(CompletionRequest, events=(answers.CompletionChunk, ErrorAnswer), ends_with_done=True)
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several. With the header Last-Event-ID, a stream that broke goes on."""
    arrived, deadline_s = time.monotonic(), timeout_of(request)
    to_raws = partial(convert.read_completion, label=request.state.request_id, deadline_s=deadline_s)
    options, raws = await reader_of(request).read(request, CompletionRequest, to_raws, deadline_s=deadline_s)
    if (event_id := request.headers.get(LAST_EVENT_ID_HEADER)) is not None:
        return _go_on(request, *parse_event_id(event_id))
    if deadline_s is not None:
        raws = [with_remaining_time(raw, arrived) for raw in raws]
    return await _generate(request, options, raws, CompletionFormat(options, _tokenizer_of(request)))


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": answers.ChatCompletionAnswer}, **GENERATE_ERRORS},
    tags=["generate"],
)
@takes(ChatCompletionRequest, events=(answers.ChatCompletionChunk, ErrorAnswer), ends_with_done=True)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation. With the header Last-Event-ID, a stream that broke goes on."""
    arrived, deadline_s = time.monotonic(), timeout_of(request)
    to_raw = partial(convert.read_chat, label=request.state.request_id, deadline_s=deadline_s)
    options, raw = await reader_of(request).read(
        request, ChatCompletionRequest, to_raw, deadline_s=deadline_s
    )
    if (event_id := request.headers.get(LAST_EVENT_ID_HEADER)) is not None:
        return _go_on(request, *parse_event_id(event_id))
    if deadline_s is not None:
        raw = with_remaining_time(raw, arrived)
    return await _generate(request, options, [raw], ChatFormat(options))


@router.get("/v1/streams/{token}", responses=error_answers(400, 403, 404, 503, 504), tags=["generate"])
@takes(events=(answers.CompletionChunk, answers.ChatCompletionChunk, ErrorAnswer), ends_with_done=True)
async def go_on_with_stream(request: Request, token: str) -> Response:
    """Go on with a stream that broke, behind the event of the header Last-Event-ID; without it, from its beginning."""
    event_id = request.headers.get(LAST_EVENT_ID_HEADER)
    if event_id is None:
        try:
            return _go_on(request, ResumeToken.parse(token), None)
        except InvalidRequest as error:
            raise NotKept(error.message) from None
    parsed, seen = parse_event_id(event_id)
    if str(parsed) != token:
        raise InvalidRequest(LAST_EVENT_ID_HEADER, "is of another stream")
    return _go_on(request, parsed, seen)


@router.post(
    "/abort_requests",
    responses={200: {"model": answers.AbortAnswer}, **error_answers(400, 413, 429)},
    tags=["generate"],
)
@takes(AbortRequest)
async def abort_requests(request: Request) -> Response:
    """End requests of the caller's tenant with what they have."""
    names = await reader_of(request).read(request, AbortRequest, names_to_abort)
    return json_response({"aborted_request_ids": await generator_of(request).abort(names)})


@router.get(
    "/v1/models",
    responses={200: {"model": answers.ModelListAnswer}, **error_answers()},
    tags=["models"],
)
async def list_models(request: Request) -> Response:
    """The models that requests may name."""
    models = [
        _model_object(name, model)
        for model in generator_of(request).models()
        for name in (model.name, *model.aliases)
    ]
    return json_response({"object": "list", "data": models})


@router.get(
    "/v1/models/{model:path}",
    responses={200: {"model": answers.ModelAnswer}, **error_answers(404, 503)},
    tags=["models"],
)
async def get_model(request: Request, model: str) -> Response:
    """One of them."""
    if not model:
        raise ModelNotFound("model: no name is given; GET /v1/models lists them")
    return json_response(_model_object(model, generator_of(request).find_model(model)))


async def _generate(
    request: Request, options: convert.AnswerOptions, raws: Sequence[RawRequest], format: AnswerFormat
) -> Response:
    generator, in_flight = generator_of(request), request.app.state.in_flight
    request_id: str = request.state.request_id
    answer_id, created_unix_s = f"{format.id_prefix}{request_id}", int(time.time())
    num_choices = options.num_choices
    limit = generator.max_choices(raws[0].model) if len(raws) > 1 else 0
    if limit and len(raws) * num_choices > limit:
        raise InvalidRequest(
            "prompt",
            f"{len(raws)} prompts with {num_choices} choices each are above the limit {limit}: so many choices can be "
            "running and waiting together; split the request",
        )
    has_ids = raws[0].resumes
    if has_ids and (len(raws) > 1 or num_choices > MAX_CHOICES_WITH_IDS):
        raise InvalidRequest(
            "stream_options.include_event_ids",
            f"{len(raws)} prompts with {num_choices} choices each are above the limits of 1 prompt and "
            f"{MAX_CHOICES_WITH_IDS} choices: each id tells the position of every choice",
        )
    answer = write_answer(format, options, answer_id, created_unix_s) if has_ids else None
    raws = [replace(raw, client_names=(*raw.client_names, answer_id), answer=answer) for raw in raws]
    notes = dict[str, str]()

    def generate(receiver: EventReceiver | None = None) -> AsyncGenerator[Event]:
        if len(raws) > 1:
            events = merge([generator.generate(raw) for raw in raws], num_choices)
        else:
            events = generator.generate(raws[0], receiver)
        return with_notes(events, notes) if raws[0].has_schema else events

    if not options.is_streamed:
        whole = whole_answer(generate(), format, answer_id=answer_id, created_unix_s=created_unix_s)
        content = await in_flight.run(request.receive, whole)
        return Response(content, headers=notes, media_type="application/json")
    chunks = ChunkEncoder(
        format,
        answer_id=answer_id,
        created_unix_s=created_unix_s,
        options=options,
        ids=StreamIds(num_choices) if has_ids else None,
    )
    ping = COMMENT_LINE if has_ids else BLANK_LINE
    return EventStream(
        generate, chunks.encode, in_flight=in_flight, request_id=request_id, ping=ping, notes=notes
    )


def _go_on(request: Request, token: ResumeToken, seen: Mapping[int, SeenChoice] | None) -> Response:
    generator, in_flight = generator_of(request), request.app.state.in_flight

    def generate(receiver: EventReceiver | None) -> AsyncGenerator[Any]:
        return generator.attach(token, seen or {}, "http", receiver)

    encode = RestEncoder(_tokenizer_of(request), seen).encode
    request_id: str = request.state.request_id
    return EventStream(generate, encode, in_flight=in_flight, request_id=request_id, ping=COMMENT_LINE)


def _tokenizer_of(request: Request) -> Callable[[], Tokenizer]:
    generator = generator_of(request)
    return lambda: generator.text_model.tokenizer


def _model_object(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "triptych",
        "root": model.name,
        "parent": model.base_model or None,
        "max_model_len": model.max_model_len,
    }
