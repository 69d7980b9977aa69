"""The public gRPC servicer: proto in, generator, proto out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc.aio

from services.frontend.generate import Generator
from services.frontend.identity import unique_request_id
from services.frontend.requests.parse import RawChat, RawRequest, why_too_many_messages
from services.frontend.work_threads import WorkThreads
from triptych.errors import DeadlineExceeded, FeatureDisabled, FieldViolation, InvalidRequest
from triptych.rpc.interceptors import current_request_id, sent_request_id, set_request_id
from triptych.rpc.status import to_status
from triptych.types.sampling import OutputKind
from triptych.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from triptych.wire.generation import event_to_proto

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
EMBEDDING_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name

_OUTPUT_KINDS = {
    common_pb2.OUTPUT_KIND_UNSPECIFIED: OutputKind.DELTA,
    common_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    common_pb2.OUTPUT_KIND_DELTA: OutputKind.DELTA,
    common_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}
_INLINE_BYTES = 8192  # a longer conversation is read on a thread
_MESSAGE_BYTES = 64  # an empty message costs as much as so many bytes
# Stand in for messages that are refused already, so that they are not reported missing as well.
_REFUSED_MESSAGES = ({"role": "user", "content": ""},)
_PROMPT_PATHS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_KWARGS_PATH = "chat.template_kwargs_json"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `triptych.v1.GenerationService`."""

    def __init__(self, generator: Generator, client_timeout_s: float) -> None:
        """`client_timeout_s`: how long a client may read nothing while its answer waits."""
        self._generator = generator
        self._client_timeout_s = client_timeout_s
        self._threads = WorkThreads(1, inline_size=_INLINE_BYTES, what="long conversations")

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        label = sent_request_id(context.invocation_metadata())  # of several calls, maybe
        own_id = unique_request_id(label) if label else current_request_id()
        request.request_id = request.request_id or own_id
        set_request_id(request.request_id)
        remaining_s = context.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineExceeded("the call's deadline had passed before the request was read")
        raw = await self._threads.run(_chat_size(request), to_raw_request, request, remaining_s)
        watch = _StallWatch(context, self._client_timeout_s)
        try:
            async with aclosing(self._generator.generate(raw)) as events:
                async for event in events:
                    watch.begin_write()
                    yield event_to_proto(event)
                    watch.end_write()
        finally:
            watch.close()

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("prompt", "none is given; set text or chat")
        prompt: str | RawChat = request.text
        if kind == "chat":
            prompt, violations = await self._threads.run(_chat_size(request), _to_chat, request.chat)
            if violations:
                raise InvalidRequest(violations)
            if request.chat.tools_json:
                raise FeatureDisabled("chat.tools_json", "this version does not serve it yet; leave it out")
        token_ids = await self._generator.tokenize(
            prompt,
            model=request.model,
            add_special_tokens=_given(request, "add_special_tokens"),
            path=_PROMPT_PATHS[kind],
            kwargs_path=_KWARGS_PATH,
        )
        max_model_len = self._generator.find_model(request.model).max_model_len
        return generation_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        text = await self._generator.detokenize(
            request.token_ids,
            model=request.model,
            skip_special_tokens=_given(request, "skip_special_tokens") is not False,
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        models = [generation_pb2.Model(**served._asdict()) for served in self._generator.models()]
        return generation_pb2.ListModelsResponse(models=models)


class _StallWatch:
    """Ends a call whose client has stopped reading. Made inside the call's task."""

    def __init__(self, context: grpc.aio.ServicerContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._call = asyncio.current_task()
        self._writing_since: float | None = None
        self._abort: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(timeout_s, self._check)

    def begin_write(self) -> None:
        """A message is about to be written, which waits while the client does not read."""
        self._writing_since = self._loop.time()

    def end_write(self) -> None:
        self._writing_since = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        written_for_s = 0.0 if self._writing_since is None else now - self._writing_since
        if written_for_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - written_for_s, self._check)
            return
        self._abort = self._loop.create_task(self._end())

    async def _end(self) -> None:
        """Send the status behind what was written, and end the call's task, which closes the generation."""
        status = to_status(DeadlineExceeded(f"the client read nothing for {self._timeout_s:g} s"))
        if self._call is not None:
            self._loop.call_soon(self._call.cancel)
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
            await self._context.abort(status.code, status.details, status.trailing_metadata)


class EmbeddingServicer(generation_pb2_grpc.EmbeddingServiceServicer):
    """Refuses `triptych.v1.EmbeddingService` by name."""

    async def Embed(
        self, request: generation_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.EmbedResponse:
        raise FeatureDisabled("EmbeddingService.Embed", "this version does not serve it yet")


def _chat_size(request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest) -> int:
    """How much work it is to read the request's conversation, in bytes."""
    if not request.HasField("chat"):
        return 0
    return request.chat.ByteSize() + _MESSAGE_BYTES * len(request.chat.messages)


def to_raw_request(request: generation_pb2.GenerateRequest, deadline_s: float | None) -> RawRequest:
    """The request as the frontend knows it; what only this servicer can see to be wrong is noted in it."""
    violations: list[FieldViolation] = []
    unsupported: list[str] = []
    kind = request.WhichOneof("prompt")
    prompt: Any = None
    match kind:
        case "text":
            prompt = request.text
        case "token_ids":
            prompt = request.token_ids.ids
        case "chat":
            prompt, violations = _to_chat(request.chat)
            if request.chat.tools_json:
                unsupported.append("chat.tools_json")
    if request.output_kind not in _OUTPUT_KINDS:
        violations.append(FieldViolation("output_kind", f"{request.output_kind} is none of 0..3"))
    paths = {"template_kwargs": _KWARGS_PATH, "deadline_s": "the call's deadline"}
    if kind is not None:
        paths["prompt"] = _PROMPT_PATHS[kind]
    return RawRequest(
        api="grpc",
        prompt=prompt,
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling_fields(request.sampling),
        output_kind=_OUTPUT_KINDS.get(request.output_kind, OutputKind.DELTA),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        truncate_prompt_tokens=_given(request, "truncate_prompt_tokens"),
        adapter=request.adapter,
        echo=request.echo,
        deadline_s=deadline_s,
        sampling_prefix="sampling.",
        paths=paths,
        violations=tuple(violations),
        unsupported=tuple(unsupported),
    )


def _sampling_fields(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that the client set; protobuf lists exactly those."""
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "allowed_token_ids" in fields:
        fields["allowed_token_ids"] = message.allowed_token_ids.ids
    return fields


def _to_chat(chat: generation_pb2.Chat) -> tuple[RawChat, list[FieldViolation]]:
    template_kwargs: Mapping[str, Any] = {}
    violations = []
    if (why := why_too_many_messages(len(chat.messages))) is not None:
        return RawChat(_REFUSED_MESSAGES), [FieldViolation("chat.messages", why)]
    if chat.template_kwargs_json:
        try:
            template_kwargs = json.loads(chat.template_kwargs_json)
        except ValueError as error:
            template_kwargs = {}
            violations.append(FieldViolation(_KWARGS_PATH, f"is not JSON: {error}"))
        if not isinstance(template_kwargs, dict):
            violations.append(FieldViolation(_KWARGS_PATH, "is not a JSON object"))
            template_kwargs = {}
    messages = [
        {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        for message in chat.messages
    ]
    add_generation_prompt = _given(chat, "add_generation_prompt") is not False
    return RawChat(messages, add_generation_prompt, template_kwargs), violations


def _given(message: Any, field: str) -> Any:
    """The value of an optional field; None where the client left it out."""
    return getattr(message, field) if message.HasField(field) else None
