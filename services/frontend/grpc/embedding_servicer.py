"""`triptych.v1.EmbeddingService`: proto in, one request of the generator for each input, proto out."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeAlias, TypeVar

import grpc.aio

from triptych.errors import InvalidRequest
from triptych.internal.v1 import long_request_pb2
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.interceptors import current_request_id, new_request_id, set_request_id
from triptych.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.batch import BatchRun, items_in_flight
from triptych_services.frontend.grpc.embedding_convert import (
    EmbedCall,
    R,
    prompt_name_of,
    read_bytes,
    read_classify,
    read_embed,
    read_rerank,
    read_score,
    write_embedding,
)
from triptych_services.frontend.grpc.long_calls import check_time, read_long, time_of_item
from triptych_services.frontend.grpc.stall_watch import StallWatch
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.pooled_calls import MAX_CALL_BYTES, AnswerBytes, PooledText, Window
from triptych_services.frontend.requests.inputs import PooledCall
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.scores import Comparison, Scores, rank, score

EMBEDDING_SERVICE = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name

_MAX_UNSENT_BYTES = 4 * MAX_CALL_BYTES
_NUMBER_BYTES = 4
_INLINE_BYTES = 8192  # more is read and written on a thread
_MAX_ANSWER_BYTES = PUBLIC_MESSAGE_BYTES - (1 << 10)

AnyItem: TypeAlias = embedding_pb2.EmbedStreamRequest | long_request_pb2.LongItem
T = TypeVar("T", EmbedCall, PooledCall, Comparison)
Read: TypeAlias = Callable[[R, str, float | None], T]


class UnsentAnswers:
    """Bounds the bytes of one stream's answers that are computed, or wait for the client to read. One event loop's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_space = asyncio.Event()

    async def reserve(self, num_bytes: int) -> None:
        """Wait until an answer of this size has space; one above the bound has it when there is no other."""
        while self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            self._has_space.clear()
            await self._has_space.wait()
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give the space of an answer back."""
        self._num_bytes -= num_bytes
        self._has_space.set()


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves `triptych.v1.EmbeddingService`."""

    def __init__(self, generator: Generator, client_timeout_s: float, long_reader: LongReader) -> None:
        """
        Args:
            client_timeout_s: How long a client may read nothing while its answer waits.
            long_reader: Reads long requests.
        """
        self._generator = generator
        self._long_reader = long_reader
        self._client_timeout_s = client_timeout_s
        self._threads = FairThreads(1, inline_size=_INLINE_BYTES, what="long calls")

    async def Embed(
        self, request: embedding_pb2.EmbedRequest | bytes, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.EmbedResponse:
        arrived = time.monotonic()
        call = await self._read_call(request, embedding_pb2.EmbedRequest, read_embed, context)
        return await self._embed(call, arrived, self._open_answer(context))

    async def EmbedStream(
        self, request_iterator: AsyncIterator[AnyItem], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[embedding_pb2.EmbedStreamResponse]:
        windows: dict[str, Window] = {}
        unsent = UnsentAnswers(_MAX_UNSENT_BYTES)
        to_bytes: dict[int, tuple[int, AnswerBytes]] = {}
        """id() of each answer that is not sent, to what is reserved for it and what it has."""

        async def answer(item: AnyItem) -> AsyncGenerator[embedding_pb2.EmbedStreamResponse]:
            arrived, size = time.monotonic(), item.ByteSize()
            call = await self._read_item(item, time_of_item(item, context.time_remaining()))
            model = call.requests.base.model
            self._generator.find_model(model)  # a made-up name gets no places
            window = windows.get(model)
            if window is None:
                window = windows[model] = self._generator.pooled.open_window(model)
            num_bytes = self._most_bytes(call, size)
            await unsent.reserve(num_bytes)
            own = self._generator.pooled.open_answer()
            try:
                embedded = await self._embed(call, arrived, own, window)
            except BaseException:
                own.close()
                unsent.release(num_bytes)
                raise
            response = embedding_pb2.EmbedStreamResponse(tag=item.tag, response=embedded)
            to_bytes[id(response)] = num_bytes, own
            yield response

        watch = StallWatch(context, self._client_timeout_s)
        try:
            run = BatchRun(
                answer,
                lambda: items_in_flight(self._generator.max_running()),
                to_error=lambda item, status: embedding_pb2.EmbedStreamResponse(tag=item.tag, error=status),
                id_of=_name_of,
            )
            async with aclosing(run.run(request_iterator)) as responses:
                async for response in responses:
                    watch.begin_write()
                    yield response
                    watch.end_write()
                    num_bytes, own = to_bytes.pop(id(response), (0, None))
                    unsent.release(num_bytes)
                    if own is not None:
                        own.close()
        finally:
            watch.close()
            for _, own in to_bytes.values():
                own.close()

    def _most_bytes(self, call: EmbedCall, size: int) -> int:
        """Return about the most bytes that the answer may have: a text has no more tokens than bytes.

        Args:
            size: Bytes of the request.
        """
        num_vectors = len(call.requests) + (size if call.is_of_tokens else 0)
        embedding_size = self._generator.find_model(call.requests.base.model).embedding_size
        return min(num_vectors * embedding_size * _NUMBER_BYTES, MAX_CALL_BYTES)

    async def Classify(
        self, request: embedding_pb2.ClassifyRequest | bytes, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.ClassifyResponse:
        arrived = time.monotonic()
        call = await self._read_call(request, embedding_pb2.ClassifyRequest, read_classify, context)
        pooled = await self._generator.pooled.compute(call.since(arrived), self._open_answer(context))
        return embedding_pb2.ClassifyResponse(
            classifications=[
                embedding_pb2.Classification(scores=text.vectors[0].tolist(), num_tokens=text.num_tokens)
                for text in pooled
            ],
            labels=self._generator.text_model.labels(pooled[0].vectors.shape[1]),
            usage=_usage(pooled),
        )

    async def Score(
        self, request: embedding_pb2.ScoreRequest | bytes, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.ScoreResponse:
        arrived = time.monotonic()
        call = await self._read_call(request, embedding_pb2.ScoreRequest, read_score, context)
        scores = await score(self._generator, call.since(arrived))
        return embedding_pb2.ScoreResponse(scores=scores.values, usage=_usage_of_scores(scores))

    async def Rerank(
        self, request: embedding_pb2.RerankRequest | bytes, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.RerankResponse:
        arrived = time.monotonic()
        call = await self._read_call(request, embedding_pb2.RerankRequest, read_rerank, context)
        scores = await score(self._generator, call.since(arrived))
        return embedding_pb2.RerankResponse(
            results=[
                embedding_pb2.RankedDocument(index=place, score=scores.values[place])
                for place in rank(scores.values, call.top_n)
            ],
            usage=_usage_of_scores(scores),
        )

    async def _embed(
        self, call: EmbedCall, arrived: float, answer: AnswerBytes, window: Window | None = None
    ) -> embedding_pb2.EmbedResponse:
        """Return the vectors of a call. `arrived`: When it came, by `time.monotonic`."""
        name = prompt_name_of(call.task_type, self._generator.text_model.pooling.prompts)
        requests = call.requests.since(arrived).with_prompt_name(name)
        pooled = await self._generator.pooled.compute(requests, answer, window)
        num_bytes = sum(text.vectors.nbytes for text in pooled)
        if num_bytes > 4 * _MAX_ANSWER_BYTES:  # even in one byte each
            raise _too_large()
        response = await self._threads.run(num_bytes, _write, pooled, call)
        if response.ByteSize() > _MAX_ANSWER_BYTES:
            raise _too_large()
        return response

    async def _read_call(
        self, request: R | bytes, kind: type[R], read: Read[R, T], context: grpc.aio.ServicerContext
    ) -> T:
        """Return what `read` makes of a request. The call has the id of the request from here on."""
        if not isinstance(request, bytes) and request.options.request_id:
            set_request_id(request.options.request_id)
        method = kind.DESCRIPTOR.name.removesuffix("Request")
        result = await self._read(request, kind, read, current_request_id(), context.time_remaining(), method)
        base = result.requests.base if isinstance(result, EmbedCall) else result.base
        set_request_id(base.head.request_id)
        return result

    async def _read_item(self, item: AnyItem, remaining_s: float | None) -> EmbedCall:
        """Return what an item asks for. Bytes are dropped once they are read."""
        request: embedding_pb2.EmbedRequest | bytes = item.request
        if isinstance(item, embedding_pb2.EmbedStreamRequest):
            options = item.request.options
            request_id = options.request_id = options.request_id or new_request_id()
        else:
            request_id = item.request_id = new_request_id()
        call = await self._read(
            request, embedding_pb2.EmbedRequest, read_embed, request_id, remaining_s, "EmbedStream"
        )
        if isinstance(item, long_request_pb2.LongItem):
            item.request_id = call.requests.base.head.request_id
            item.ClearField("request")
        return call

    async def _read(
        self,
        request: R | bytes,
        kind: type[R],
        read: Read[R, T],
        request_id: str,
        remaining_s: float | None,
        method: str,
    ) -> T:
        """Return what `read` makes of a request: here if it is short, else on a thread, or in a child process.

        Args:
            request_id: Its id where its client gives none.
        """
        if isinstance(request, bytes):
            parse = functools.partial(read_bytes, kind, read, request_id, remaining_s)
            path = f"/{EMBEDDING_SERVICE}/{method}"
            return await read_long(self._long_reader, request, parse, path, remaining_s)
        check_time(remaining_s)
        return await self._threads.run(request.ByteSize(), read, request, request_id, remaining_s)

    def _open_answer(self, context: grpc.aio.ServicerContext) -> AnswerBytes:
        """Return the bytes of the answer to a call, which are counted until it has ended: the answer is sent then."""
        answer = self._generator.pooled.open_answer()
        context.add_done_callback(lambda _: answer.close())
        return answer


def _name_of(item: AnyItem) -> str:
    """Return the request id of an item. Empty: it has none yet."""
    if isinstance(item, long_request_pb2.LongItem):
        return item.request_id
    return item.request.options.request_id


def _write(pooled: list[PooledText], call: EmbedCall) -> embedding_pb2.EmbedResponse:
    embeddings = [write_embedding(text, call.encoding, is_of_tokens=call.is_of_tokens) for text in pooled]
    return embedding_pb2.EmbedResponse(embeddings=embeddings, usage=_usage(pooled))


def _usage(pooled: list[PooledText]) -> common_pb2.Usage:
    return common_pb2.Usage(
        num_prompt_tokens=sum(text.num_tokens for text in pooled),
        num_cached_tokens=sum(text.num_cached_tokens for text in pooled),
    )


def _usage_of_scores(scores: Scores) -> common_pb2.Usage:
    return common_pb2.Usage(num_prompt_tokens=scores.num_tokens, num_cached_tokens=scores.num_cached_tokens)


def _too_large() -> InvalidRequest:
    why = (
        f"the answer exceeds the limit of {_MAX_ANSWER_BYTES} bytes; send fewer in a call, or use EmbedStream"
    )
    return InvalidRequest("inputs", why)
