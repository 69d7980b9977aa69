"""`triptych.v1.GenerationService`: proto in, generator, proto out."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

import grpc.aio

from triptych.errors import InvalidRequest
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.interceptors import (
    current_request_id,
    new_request_id,
    sent_request_id,
    set_request_id,
)
from triptych.v1 import chat_pb2, generation_pb2, generation_pb2_grpc
from triptych.wire.generation import EventEncoder, WholeAnswer
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.batch import BatchRun, items_in_flight
from triptych_services.frontend.grpc.convert import (
    CHAT_PATHS,
    chat_size,
    read_answer,
    to_raw_request,
    to_tokenize_prompt,
    write_answer,
)
from triptych_services.frontend.grpc.long_calls import (
    AnyGenerate,
    AnyItem,
    R,
    check_time,
    name_call,
    name_of,
    read_generation,
    read_long,
    read_tokenize,
    time_of_item,
)
from triptych_services.frontend.grpc.stall_watch import StallWatch
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.requests.identity import unique_request_id
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.requests.raw import MAX_ABORTS, RawRequest, with_remaining_time
from triptych_services.frontend.streams.placement import AttachedEvent
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

_INLINE_BYTES = 8192  # a longer conversation is read on a thread
_PIECE = 4096  # entries of a list that are written at once
_MAX_ANSWER_BYTES = PUBLIC_MESSAGE_BYTES - (1 << 10)

T = TypeVar("T")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `triptych.v1.GenerationService`."""

    def __init__(self, generator: Generator, client_timeout_s: float, long_reader: LongReader) -> None:
        """
        Args:
            client_timeout_s: How long a client may read nothing while its answer waits.
            long_reader: Reads long requests.
        """
        self._generator = generator
        self._client_timeout_s = client_timeout_s
        self._long_reader = long_reader
        self._threads = FairThreads(1, inline_size=_INLINE_BYTES, what="long conversations")

    async def Generate(
        self, request: generation_pb2.GenerateRequest | bytes, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GenerateResponse:
        request, raw = await self._read_call(request, generation_pb2.GenerateRequest, context)
        answer, num_bytes = WholeAnswer(), 0
        async with aclosing(self._messages(raw, _encoder(request))) as messages:
            async for message in messages:
                num_bytes += message.ByteSize()
                if num_bytes > _MAX_ANSWER_BYTES:
                    why = f"the answer exceeds the limit of {_MAX_ANSWER_BYTES} bytes; use StreamGenerate"
                    raise InvalidRequest("response", why)
                answer.add(message)
        return answer.take()

    async def StreamGenerate(
        self, request: generation_pb2.StreamGenerateRequest | bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.StreamGenerateResponse]:
        request, raw = await self._read_call(request, generation_pb2.StreamGenerateRequest, context)
        encoder = _encoder(request)
        watch = StallWatch(context, self._client_timeout_s)
        try:
            async with aclosing(self._generator.generate(raw)) as events:
                async for event in events:
                    for message in encoder.encode(event):
                        watch.begin_write()
                        yield message
                        watch.end_write()
        finally:
            watch.close()

    async def BatchGenerate(
        self,
        request_iterator: AsyncIterator[AnyItem],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[generation_pb2.BatchGenerateResponse]:
        async def answer(item: AnyItem) -> AsyncGenerator[generation_pb2.BatchGenerateResponse]:
            request, raw = await self._read_item(item, time_of_item(item, context.time_remaining()))
            async with aclosing(self._messages(raw, _encoder(request))) as messages:
                async for message in messages:
                    yield generation_pb2.BatchGenerateResponse(tag=item.tag, event=message)

        watch = StallWatch(context, self._client_timeout_s)
        try:
            run = BatchRun(
                answer,
                lambda: items_in_flight(self._generator.max_running()),
                to_error=lambda item, status: generation_pb2.BatchGenerateResponse(
                    tag=item.tag, error=status
                ),
                id_of=name_of,
            )
            async with aclosing(run.run(request_iterator)) as responses:
                async for response in responses:
                    watch.begin_write()
                    yield response
                    watch.end_write()
        finally:
            watch.close()

    async def Attach(
        self, request: generation_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.AttachResponse]:
        if request.request_id:
            set_request_id(request.request_id)
        token = ResumeToken.parse(request.resume_token)
        encoder: EventEncoder | None = None
        watch = StallWatch(context, self._client_timeout_s)
        try:
            async with aclosing(self._generator.attach(token, _seen(request), "grpc")) as events:
                async for event in events:
                    if isinstance(event, AttachedEvent):
                        encoder = read_answer(event.state.answer, request.last_sequence)
                        continue
                    assert encoder is not None, "the first event says how the others are sent"
                    for message in encoder.encode(event):
                        watch.begin_write()
                        yield generation_pb2.AttachResponse(event=message)
                        watch.end_write()
        finally:
            watch.close()

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        num_ids = len(request.request_ids)
        if not 1 <= num_ids <= MAX_ABORTS:
            raise InvalidRequest("request_ids", f"{num_ids} ids are not within the limits 1..{MAX_ABORTS}")
        aborted = await self._generator.abort(request.request_ids)
        return generation_pb2.AbortResponse(aborted_request_ids=aborted)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest | bytes, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        if isinstance(request, bytes):
            rest, asked = await self._read_long(request, read_tokenize, "Tokenize", context.time_remaining())
        else:
            rest, size = request, _size(request.chat if request.HasField("chat") else None)
            asked = await self._threads.run(size, to_tokenize_prompt, request)
        prompt, add_special_tokens, path = asked
        token_ids = await self._generator.text.tokenize(
            prompt,
            model=rest.model,
            add_special_tokens=add_special_tokens,
            paths={**CHAT_PATHS, "prompt": path},
        )
        token_bytes, offsets = list[bytes](), list[tuple[int, int]]()
        if rest.with_bytes:
            token_bytes = await self._generator.text.token_bytes(token_ids)
        if rest.with_offsets and isinstance(prompt, str):
            offsets = await self._generator.text.find_offsets(prompt, add_special_tokens=add_special_tokens)
        response = await self._threads.run(len(token_ids), _write_tokens, token_ids, token_bytes, offsets)
        response.max_model_len = self._generator.find_model(rest.model).max_model_len
        return response

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        text = await self._generator.text.detokenize(
            request.token_ids,
            model=request.model,
            skip_special_tokens=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def _read_call(
        self, request: R | bytes, kind: type[R], context: grpc.aio.ServicerContext
    ) -> tuple[R, RawRequest]:
        """Return a request, with an id, and what it asks for. One that comes as bytes returns without its prompt."""
        label = sent_request_id(context.invocation_metadata())  # of several calls, maybe
        own_id = unique_request_id(label) if label else current_request_id()
        remaining_s = context.time_remaining()
        if isinstance(request, bytes):
            set_request_id(own_id)
            method = kind.DESCRIPTOR.name.removesuffix("Request")
            rest, raw = await self._read_bytes(request, kind, own_id, method, remaining_s)
            set_request_id(rest.request_id)
            return rest, raw
        name_call(request, own_id)
        set_request_id(request.request_id)
        return request, await self._read(request, remaining_s)

    async def _read_item(
        self, item: AnyItem, remaining_s: float | None
    ) -> tuple[generation_pb2.StreamGenerateRequest, RawRequest]:
        """Return the request of an item, as `_read_call` does. Bytes are dropped once they are read."""
        if isinstance(item, generation_pb2.BatchGenerateRequest):
            request = item.request
            request.request_id = request.request_id or new_request_id()
            raw = await self._read(request, remaining_s)
        else:
            item.request_id = new_request_id()
            data, kind = item.request, generation_pb2.StreamGenerateRequest
            request, raw = await self._read_bytes(data, kind, item.request_id, "BatchGenerate", remaining_s)
            item.request_id = request.request_id
            item.ClearField("request")
        return request, raw

    async def _read_bytes(
        self, data: bytes, kind: type[R], request_id: str, method: str, remaining_s: float | None
    ) -> tuple[R, RawRequest]:
        """Return what a child process reads. `request_id`: Its id where its client gives none."""
        arrived = time.monotonic()
        read = functools.partial(read_generation, kind, request_id, remaining_s)
        rest, raw = await self._read_long(data, read, method, remaining_s)
        if isinstance(rest, generation_pb2.StreamGenerateRequest):
            raw = replace(raw, answer=write_answer(rest.generation), resumes=rest.resumes)
        return rest, with_remaining_time(raw, arrived)

    async def _read_long(
        self, data: bytes, read: Callable[[bytes], T], method: str, remaining_s: float | None
    ) -> T:
        return await read_long(self._long_reader, data, read, f"/{SERVICE}/{method}", remaining_s)

    async def _messages(
        self, raw: RawRequest, encoder: EventEncoder
    ) -> AsyncGenerator[generation_pb2.StreamGenerateResponse]:
        """Stream the answer. Closing it aborts the request."""
        async with aclosing(self._generator.generate(raw)) as events:
            async for event in events:
                for message in encoder.encode(event):
                    yield message

    async def _read(self, request: AnyGenerate, remaining_s: float | None) -> RawRequest:
        """Return what a request asks for. It is read on a thread if its conversation is long."""
        check_time(remaining_s)
        generation = request.generation
        size = _size(generation.chat if generation.HasField("chat") else None)
        answer, resumes = None, False
        if isinstance(request, generation_pb2.StreamGenerateRequest):
            answer, resumes = write_answer(generation), request.resumes
        asked = request.request_id, generation, remaining_s
        return await self._threads.run(size, to_raw_request, *asked, answer=answer, resumes=resumes)


def _write_tokens(
    token_ids: Sequence[int], token_bytes: Sequence[bytes], offsets: Sequence[tuple[int, int]]
) -> generation_pb2.TokenizeResponse:
    """Return the answer to Tokenize, written in pieces: each holds the interpreter's lock to its end."""
    response = generation_pb2.TokenizeResponse()
    for start in range(0, len(token_ids), _PIECE):
        piece = slice(start, start + _PIECE)
        response.token_ids.extend(token_ids[piece])
        response.token_bytes.extend(token_bytes[piece])
        response.start_offsets.extend([start for start, _ in offsets[piece]])
        response.end_offsets.extend([end for _, end in offsets[piece]])
    return response


def _seen(request: generation_pb2.AttachRequest) -> dict[int, SeenChoice]:
    """Return what the client has of each choice. Raises InvalidRequest if it says so twice."""
    seen: dict[int, SeenChoice] = {}
    for place, choice in enumerate(request.seen):
        if choice.index in seen:
            raise InvalidRequest(f"seen[{place}].index", f"{choice.index} is there twice")
        seen[choice.index] = SeenChoice(choice.num_tokens, choice.finished)
    return seen


def _encoder(request: AnyGenerate) -> EventEncoder:
    generation = request.generation
    return EventEncoder(generation.response, generation.length.stop_token_ids)


def _size(chat: chat_pb2.Chat | None) -> int:
    return 0 if chat is None else chat_size(chat)
