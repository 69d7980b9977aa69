"""The routes of the HTTP API and the app that serves them."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.access.keys import ApiKeys
from services.frontend.generate import Generator, ServedModel
from services.frontend.openai import answers, convert, schema
from services.frontend.openai.convert import REQUEST_ID_HEADER
from services.frontend.openai.errors import error_response, install_handlers, json_response
from services.frontend.openai.in_flight import InFlight
from services.frontend.openai.key_guard import KeyGuard
from services.frontend.openai.objects import AnswerFormat, ChatFormat, CompletionFormat, whole_answer
from services.frontend.openai.request_body import BodyReader
from services.frontend.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.frontend.openai.streams import EventStream, chunks, merge
from services.frontend.requests.parse import MAX_DEADLINE_S
from services.frontend.requests.raw import RawChat, RawRequest
from triptych.errors import EngineUnavailable, InvalidRequest
from triptych.rpc.interceptors import new_request_id
from triptych.types.events import Event

VERSION = importlib.metadata.version("triptych")

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": answers.ErrorAnswer, "description": "The request cannot be served as sent."},
    "5XX": {"model": answers.ErrorAnswer, "description": "The server failed or cannot serve now."},
}
_TimeoutS = Annotated[
    float | None,
    Header(alias=convert.TIMEOUT_HEADER, description="Seconds that all of it may take; more is a 504."),
]

router = APIRouter(responses=_ERRORS)


def create_app(
    generator: Generator,
    keys: ApiKeys | None = None,
    cors_origins: Sequence[str] = (),
    *,
    refuses_unknown: bool = True,
) -> FastAPI:
    """Return the app, not bound to a port yet. The server uses `app.state.in_flight` to stop it.

    Args:
        keys: The API keys that requests must send. None: none is asked for.
        cors_origins: Origins whose pages may call from a browser; `*`: any.
        refuses_unknown: See `BodyReader`.
    """
    app = FastAPIOffline(
        title="Triptych",
        version=VERSION,
        description="OpenAI-compatible completions and chat completions, and a few routes for operators.",
        docs_url="/docs",  # Swagger UI; the framework's own page loads it from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.generator = generator
    app.state.in_flight = InFlight()
    app.state.reader = BodyReader(refuses_unknown=refuses_unknown)
    app.include_router(router)
    app.openapi = functools.cache(functools.partial(build_document, app))  # type: ignore[method-assign]
    install_handlers(app)
    if keys is not None:
        app.add_middleware(KeyGuard, keys=keys)
    app.add_middleware(RequestGuard)  # outside of the others, whose errors it answers
    if cors_origins:
        # Outside of that: a page reads no error without these headers, and a preflight has no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
        )
    return app


@router.post("/v1/completions", responses={200: {"model": answers.CompletionAnswer}}, tags=["generate"])
async def create_completion(request: Request, timeout_s: _TimeoutS = None) -> Response:
    """Complete one prompt or several."""

    def to_raws(body: CompletionRequest) -> tuple[convert.AnswerOptions, list[RawRequest]]:
        raws = convert.completion_requests(body, label=request.state.request_id, deadline_s=timeout_s)
        return convert.answer_options(body), raws

    options, raws = await _reader(request).read(request, CompletionRequest, to_raws)
    format = CompletionFormat(wants_logprobs=options.wants_logprobs, num_choices=options.num_choices)
    return await _generate(request, options, raws, format)


@router.post(
    "/v1/chat/completions", responses={200: {"model": answers.ChatCompletionAnswer}}, tags=["generate"]
)
async def create_chat_completion(request: Request, timeout_s: _TimeoutS = None) -> Response:
    """Answer a conversation."""

    def to_raw(body: ChatCompletionRequest) -> tuple[convert.AnswerOptions, RawRequest]:
        raw = convert.chat_request(body, label=request.state.request_id, deadline_s=timeout_s)
        return convert.answer_options(body), raw

    options, raw = await _reader(request).read(request, ChatCompletionRequest, to_raw)
    return await _generate(request, options, [raw], ChatFormat(wants_logprobs=options.wants_logprobs))


@router.get("/v1/models", responses={200: {"model": answers.ModelListAnswer}}, tags=["models"])
async def list_models(request: Request) -> Response:
    """The models that requests may name."""
    models = [_model_object(model) for model in _generator(request).models()]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{model:path}", responses={200: {"model": answers.ModelAnswer}}, tags=["models"])
async def get_model(request: Request, model: str) -> Response:
    """One of them."""
    return json_response(_model_object(_generator(request).find_model(model)))


@router.post("/tokenize", responses={200: {"model": answers.TokenizeAnswer}}, tags=["tokens"])
async def tokenize(request: Request) -> Response:
    """Text or a conversation -> token ids."""

    def to_prompt(body: TokenizeRequest) -> tuple[str, str | RawChat, bool | None]:
        return body.model or "", convert.tokenize_prompt(body), body.add_special_tokens

    model, prompt, add_special_tokens = await _reader(request).read(request, TokenizeRequest, to_prompt)
    generator = _generator(request)
    token_ids = await generator.tokenize(
        prompt,
        model=model,
        add_special_tokens=add_special_tokens,
        paths={} if isinstance(prompt, str) else convert.CHAT_PATHS,
    )
    max_model_len = generator.find_model(model).max_model_len
    return json_response({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})


@router.post("/detokenize", responses={200: {"model": answers.DetokenizeAnswer}}, tags=["tokens"])
async def detokenize(request: Request) -> Response:
    """Token ids -> text."""

    def to_ids(body: DetokenizeRequest) -> tuple[str, list[int], bool]:
        return body.model or "", convert.detokenize_ids(body), body.skip_special_tokens is not False

    model, token_ids, skip_special_tokens = await _reader(request).read(request, DetokenizeRequest, to_ids)
    text = await _generator(request).detokenize(
        token_ids, model=model, skip_special_tokens=skip_special_tokens, path="tokens"
    )
    return json_response({"prompt": text})


@router.get("/health", responses={200: {"model": answers.HealthAnswer}}, tags=["operate"])
async def health(request: Request) -> Response:
    """200 when requests can be served, 503 with the reason when not."""
    generator = _generator(request)
    if not generator.is_ready:
        raise EngineUnavailable(generator.why_not_ready)
    return json_response({"status": "ready"})


@router.get("/ping", responses={200: {"model": answers.PingAnswer}}, tags=["operate"])
async def ping() -> Response:
    """200 while the process lives, ready or not."""
    return json_response({"status": "alive"})


@router.get("/version", responses={200: {"model": answers.VersionAnswer}}, tags=["operate"])
async def version() -> Response:
    """The version of this server."""
    return json_response({"version": VERSION})


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, tags=["operate"])
async def metrics() -> Response:
    """This process's Prometheus metrics."""
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


async def _generate(
    request: Request, options: convert.AnswerOptions, raws: Sequence[RawRequest], format: AnswerFormat
) -> Response:
    generator, in_flight = _generator(request), request.app.state.in_flight
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
    streams = [generator.generate(raw) for raw in raws]
    events: AsyncGenerator[Event] = streams[0] if len(streams) == 1 else merge(streams, num_choices)
    if not options.is_streamed:
        answer = whole_answer(events, format, answer_id=answer_id, created_unix_s=created_unix_s)
        return json_response(await in_flight.run(request.receive, answer))
    pieces = chunks(
        events,
        format,
        answer_id=answer_id,
        created_unix_s=created_unix_s,
        num_choices=num_choices,
        include_usage=options.includes_usage,
    )
    return EventStream(pieces, in_flight=in_flight, request_id=request_id)


def _reader(request: Request) -> BodyReader:
    reader: BodyReader = request.app.state.reader
    return reader


def _generator(request: Request) -> Generator:
    generator: Generator = request.app.state.generator
    return generator


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "triptych",
        "max_model_len": model.max_model_len,
    }


_REFERENCE = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}
_CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/completions": answers.CompletionChunk,
    "/v1/chat/completions": answers.ChatCompletionChunk,
}


def build_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the app."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation") for kind in _BODIES.values()]
    chunks: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (kind, "serialization") for kind in _CHUNKS.values()
    ]
    _, definitions = models_json_schema([*bodies, *chunks], ref_template=_REFERENCE)
    document["components"]["schemas"] |= definitions["$defs"]
    for path, body in _BODIES.items():
        content = {"application/json": {"schema": _reference(body)}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, chunk in _CHUNKS.items():
        (timeout,) = document["paths"][path]["post"]["parameters"]
        timeout["schema"] = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {
            "schema": {
                "description": "The `data` of each event is a chunk, or an error that ends it; the last is [DONE].",
                "oneOf": [_reference(chunk), _reference(answers.ErrorAnswer), {"const": "[DONE]"}],
            }
        }
    return document


def _reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=kind.__name__)}


MAX_BODY_BYTES = 10 << 20


class RequestGuard:
    """ASGI middleware outside of Starlette's own handling of errors, which would log a bug twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered like GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER) or new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            num_declared_bytes = headers.get("content-length", "0")
            if num_declared_bytes.isdecimal() and int(num_declared_bytes) > MAX_BODY_BYTES:
                raise _body_too_large(f"{num_declared_bytes} bytes are")
            await self._app(scope, _Counted(receive), send_with_id)
        except Exception as error:
            if has_started:
                raise  # too late for an answer; the server closes the connection and logs it
            await error_response(error, request_id)(scope, receive, send_with_id)


class _Counted:
    """Receives a body of unknown length up to the bound."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > MAX_BODY_BYTES:
                raise _body_too_large("it is")
        return message


def _body_too_large(what: str) -> HTTPException:
    return HTTPException(
        413, f"the body is too large: {what} above the limit {MAX_BODY_BYTES} bytes (10 MiB)"
    )
