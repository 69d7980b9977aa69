"""`triptych.v1.EmbeddingService`: proto in, one request of the generator for each input, proto out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc.aio

from triptych.errors import DeadlineExceeded, InvalidRequest
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.interceptors import current_request_id, new_request_id, set_request_id
from triptych.types.pooling import PoolingParams, Task
from triptych.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.batch import BatchRun, items_in_flight
from triptych_services.frontend.grpc.embedding_convert import (
    base_request,
    input_requests,
    pooling_params,
    prompt_name_of,
    to_passages,
    write_embedding,
)
from triptych_services.frontend.grpc.stall_watch import StallWatch
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.pooled_calls import MAX_CALL_BYTES, AnswerBytes, PooledText, Window
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.scores import Scores, pair_up, rank, score

EMBEDDING_SERVICE = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name

_MAX_UNSENT_BYTES = 4 * MAX_CALL_BYTES
_NUMBER_BYTES = 4
_INLINE_BYTES = 8192  # more is read and written on a thread
_MAX_ANSWER_BYTES = PUBLIC_MESSAGE_BYTES - (1 << 10)


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

    def __init__(self, generator: Generator, client_timeout_s: float) -> None:
        """
        Args:
            client_timeout_s: How long a client may read nothing while its answer waits.
        """
        self._generator = generator
        self._client_timeout_s = client_timeout_s
        self._threads = FairThreads(1, inline_size=_INLINE_BYTES, what="long calls")

    async def Embed(
        self, request: embedding_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.EmbedResponse:
        _name(request.options)
        return await self._embed(request, context.time_remaining(), self._open_answer(context))

    async def EmbedStream(
        self,
        request_iterator: AsyncIterator[embedding_pb2.EmbedStreamRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[embedding_pb2.EmbedStreamResponse]:
        windows: dict[str, Window] = {}
        unsent = UnsentAnswers(_MAX_UNSENT_BYTES)
        to_bytes: dict[int, tuple[int, AnswerBytes]] = {}
        """id() of each answer that is not sent, to what is reserved for it and what it has."""

        async def answer(
            item: embedding_pb2.EmbedStreamRequest,
        ) -> AsyncGenerator[embedding_pb2.EmbedStreamResponse]:
            item.request.options.request_id = item.request.options.request_id or new_request_id()
            remaining_s, model = context.time_remaining(), item.request.model
            if item.HasField("timeout_ms"):
                timeout_s = item.timeout_ms / 1000
                remaining_s = timeout_s if remaining_s is None else min(timeout_s, remaining_s)
            self._generator.find_model(model)  # a made-up name gets no places
            window = windows.get(model)
            if window is None:
                window = windows[model] = self._generator.pooled.open_window(model)
            num_bytes = self._most_bytes(item.request)
            await unsent.reserve(num_bytes)
            own = self._generator.pooled.open_answer()
            try:
                embedded = await self._embed(item.request, remaining_s, own, window)
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
                id_of=lambda item: item.request.options.request_id,
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

    def _most_bytes(self, request: embedding_pb2.EmbedRequest) -> int:
        """Return about the most bytes that the answer may have: a text has no more tokens than bytes."""
        num_vectors = len(request.inputs)
        if request.pooling == embedding_pb2.POOLING_TYPE_ALL:
            num_vectors += request.ByteSize()
        size = self._generator.find_model(request.model).embedding_size
        return min(num_vectors * size * _NUMBER_BYTES, MAX_CALL_BYTES)

    async def Classify(
        self, request: embedding_pb2.ClassifyRequest, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.ClassifyResponse:
        base = self._base(request, context)
        pooling = PoolingParams(Task.CLASSIFY, activation=_activation(request))
        raws = await self._threads.run(request.ByteSize(), input_requests, base, pooling, request.inputs, "")
        pooled = await self._generator.pooled.compute(raws, self._open_answer(context))
        return embedding_pb2.ClassifyResponse(
            classifications=[
                embedding_pb2.Classification(scores=text.vectors[0].tolist(), num_tokens=text.num_tokens)
                for text in pooled
            ],
            labels=self._generator.text_model.labels(pooled[0].vectors.shape[1]),
            usage=_usage(pooled),
        )

    async def Score(
        self, request: embedding_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.ScoreResponse:
        base = self._base(request, context)
        queries, documents = (
            to_passages(request.queries, "queries"),
            to_passages(request.documents, "documents"),
        )
        pairs = pair_up(queries, documents, "queries", "documents")
        scores = await score(self._generator, base, pairs, activation=_activation(request))
        return embedding_pb2.ScoreResponse(scores=scores.values, usage=_usage_of_scores(scores))

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, context: grpc.aio.ServicerContext
    ) -> embedding_pb2.RerankResponse:
        base = self._base(request, context)
        if request.HasField("top_n") and request.top_n < 1:
            raise InvalidRequest("top_n", "0 is below the limit 1")
        query = to_passages([request.query], "query", is_list=False)
        documents = to_passages(request.documents, "documents")
        pairs = pair_up(query, documents, "query", "documents")
        scores = await score(self._generator, base, pairs, activation=_activation(request))
        places = rank(scores.values, request.top_n if request.HasField("top_n") else None)
        return embedding_pb2.RerankResponse(
            results=[
                embedding_pb2.RankedDocument(index=place, score=scores.values[place]) for place in places
            ],
            usage=_usage_of_scores(scores),
        )

    async def _embed(
        self,
        request: embedding_pb2.EmbedRequest,
        remaining_s: float | None,
        answer: AnswerBytes,
        window: Window | None = None,
    ) -> embedding_pb2.EmbedResponse:
        _check_time(remaining_s)
        pooling = pooling_params(request)
        base = base_request(request, remaining_s)
        prompt_name = prompt_name_of(request.task_type, self._generator.text_model.pooling.prompts)
        raws = await self._threads.run(
            request.ByteSize(), input_requests, base, pooling, request.inputs, prompt_name
        )
        pooled = await self._generator.pooled.compute(raws, answer, window)
        num_bytes = sum(text.vectors.nbytes for text in pooled)
        if num_bytes > 4 * _MAX_ANSWER_BYTES:  # even in one byte each
            raise _too_large()
        response = await self._threads.run(num_bytes, _write, pooled, request)
        if response.ByteSize() > _MAX_ANSWER_BYTES:
            raise _too_large()
        return response

    def _open_answer(self, context: grpc.aio.ServicerContext) -> AnswerBytes:
        """Return the bytes of the answer to a call, which are counted until it has ended: the answer is sent then."""
        answer = self._generator.pooled.open_answer()
        context.add_done_callback(lambda _: answer.close())
        return answer

    def _base(
        self,
        request: embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest | embedding_pb2.RerankRequest,
        context: grpc.aio.ServicerContext,
    ) -> RawRequest:
        _name(request.options)
        remaining_s = context.time_remaining()
        _check_time(remaining_s)
        return base_request(request, remaining_s)


def _name(options: embedding_pb2.PoolingCallOptions) -> None:
    """Give a call an id, unless its client has."""
    options.request_id = options.request_id or current_request_id()
    set_request_id(options.request_id)


def _check_time(remaining_s: float | None) -> None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed before the request was read")


def _activation(
    request: embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest | embedding_pb2.RerankRequest,
) -> bool | None:
    """Return whether numbers become probabilities; None: as the model has it."""
    return not request.raw_scores if request.HasField("raw_scores") else None


def _write(pooled: list[PooledText], request: embedding_pb2.EmbedRequest) -> embedding_pb2.EmbedResponse:
    is_of_tokens = request.pooling == embedding_pb2.POOLING_TYPE_ALL
    embeddings = [write_embedding(text, request.encoding, is_of_tokens=is_of_tokens) for text in pooled]
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
