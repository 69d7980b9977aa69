"""EmbeddingService over real gRPC, before a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
import pytest

from tests.frontend.http.openai.test_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, length_score, pool
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import MODEL, FakeEngine, SubmittedChoice, eventually
from tests.helpers.grpc_api import error_of, open_api
from triptych import errors
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.v1 import embedding_pb2 as pb
from triptych.v1 import embedding_pb2_grpc
from triptych_services.frontend.grpc.embedding_servicer import UnsentAnswers

TOKENIZER = byte_tokenizer()


@asynccontextmanager
async def serve(
    model: Any = EMBEDDER, pool: Any = pool, **options: Any
) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with FakeEngine(model=model, pool=pool) as engine, open_api(engine, **options) as api:
        yield embedding_pb2_grpc.EmbeddingServiceStub(api.channel), engine


def texts(*given: str) -> list[pb.EmbeddingInput]:
    return [pb.EmbeddingInput(text={"text": text}) for text in given]


def vector(text: str) -> np.ndarray:
    ids = np.array(TOKENIZER.encode(text), np.float32)
    return np.array([ids.sum(), ids[0], ids[-1], len(ids)], np.float32) / np.float32(3)


async def test_texts_and_ids_become_vectors_in_their_order() -> None:
    async with serve() as (stub, engine):
        inputs = [*texts("Hello", "world"), pb.EmbeddingInput(token_ids={"ids": TOKENIZER.encode("abc")})]
        options = pb.PoolingCallOptions(request_id="mine", tenant="me", priority=2, cache_salt="s")
        answer = await stub.Embed(
            pb.EmbedRequest(inputs=inputs, pooling=pb.POOLING_TYPE_MEAN, options=options)
        )
        for got, text in zip(answer.embeddings, ("Hello", "world", "abc"), strict=True):
            assert list(got.floats.values) == vector(text).tolist()
            assert got.num_tokens == len(TOKENIZER.encode(text))
        assert answer.usage.num_prompt_tokens == sum(each.num_tokens for each in answer.embeddings)
        heads = sorted(
            (request.request.head for request in engine.submitted), key=lambda head: head.request_id
        )
        assert [head.request_id for head in heads] == ["mine-0", "mine-1", "mine-2"]
        assert (heads[0].tenant, heads[0].priority, heads[0].cache_salt) == ("me", 2, "s")
        assert engine.submitted[0].request.pooling == PoolingParams(Task.EMBED, kind=PoolingKind.MEAN)


async def test_encodings_hold_the_same_vector() -> None:
    def unit(request: SubmittedChoice) -> np.ndarray:
        return np.array([[0.5, -1.0, 0.0, 0.25, 1.0, 0.7, -0.1, 0.3, 0.9]], np.float32)

    expected = unit(None)[0]  # type: ignore[arg-type]
    async with serve(replace(EMBEDDER, embedding_size=9), unit) as (stub, _):

        async def packed(encoding: Any) -> bytes:
            answer = await stub.Embed(pb.EmbedRequest(inputs=texts("x"), encoding=encoding))
            return answer.embeddings[0].packed  # type: ignore[no-any-return]

        assert await packed(pb.EMBEDDING_ENCODING_FLOAT32_BYTES) == expected.astype("<f4").tobytes()
        int8 = np.frombuffer(await packed(pb.EMBEDDING_ENCODING_INT8), np.int8)
        np.testing.assert_allclose(int8 / 127, expected, atol=0.5 / 127)
        assert await packed(pb.EMBEDDING_ENCODING_BINARY) == bytes([0b10011101, 0b10000000])


async def test_all_tokens_may_have_vectors() -> None:
    async with serve() as (stub, _):
        answer = await stub.Embed(pb.EmbedRequest(inputs=texts("abc"), pooling=pb.POOLING_TYPE_ALL))
        vectors = answer.embeddings[0].token_vectors
        assert vectors.num_columns == 2
        assert list(vectors.values)[::2] == TOKENIZER.encode("abc")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.EmbedRequest(), "inputs"),
        (pb.EmbedRequest(inputs=texts(*["x"] * 3000)), "inputs"),
        (pb.EmbedRequest(inputs=texts("a", "")), "inputs[1].text.text"),
        (pb.EmbedRequest(inputs=[pb.EmbeddingInput()]), "inputs[0]"),
        (pb.EmbedRequest(inputs=texts("a" * 300)), "inputs[0].text.text"),
        (pb.EmbedRequest(inputs=texts("a"), dimensions=9), "dimensions"),
        (pb.EmbedRequest(inputs=texts("a"), dimensions=0), "dimensions"),
        (pb.EmbedRequest(inputs=texts("a"), encoding=9), "encoding"),
        (pb.EmbedRequest(inputs=[pb.EmbeddingInput(token_ids={"ids": [999]})]), "inputs[0].token_ids.ids[0]"),
        (pb.EmbedRequest(inputs=[pb.EmbeddingInput(chat={})]), "inputs[0].chat.messages"),
    ],
)
async def test_bad_requests_are_named(request_: pb.EmbedRequest, field: str) -> None:
    async with serve() as (stub, _):
        bystander = asyncio.create_task(_embed(stub, *["fine"] * 30))
        error = await error_of(stub.Embed(request_))
        assert isinstance(error, errors.InvalidRequest)
        assert error.violations[0].field == field
        assert len((await bystander).embeddings) == 30


async def _embed(stub: Any, *given: str) -> pb.EmbedResponse:
    return await stub.Embed(pb.EmbedRequest(inputs=texts(*given)))  # type: ignore[no-any-return]


async def test_a_model_without_the_task_says_what_it_serves() -> None:
    async with serve(MODEL) as (stub, _):
        error = await error_of(stub.Embed(pb.EmbedRequest(inputs=texts("x"))))
        assert isinstance(error, errors.FeatureDisabled)
        assert "serves generate" in error.message


async def test_a_stream_answers_each_item_and_an_error_ends_its_own() -> None:
    async with serve() as (stub, _):

        async def items() -> AsyncIterator[pb.EmbedStreamRequest]:
            for tag in range(50):
                given = ["a", f"text {tag}"] if tag != 7 else ["a", ""]
                yield pb.EmbedStreamRequest(tag=tag, request=pb.EmbedRequest(inputs=texts(*given)))

        answers = {answer.tag: answer async for answer in stub.EmbedStream(items())}
        assert len(answers) == 50
        assert "inputs[1].text.text" in answers[7].error.message
        for tag in set(range(50)) - {7}:
            got = answers[tag].response.embeddings[1]
            assert list(got.floats.values) == vector(f"text {tag}").tolist()


async def test_leaving_a_call_aborts_its_inputs() -> None:
    async with FakeEngine(model=EMBEDDER) as engine, open_api(engine) as api:
        stub = embedding_pb2_grpc.EmbeddingServiceStub(api.channel)
        call = stub.Embed(pb.EmbedRequest(inputs=texts("a", "b", "c")))
        await eventually(lambda: engine.num_alive == 3)
        call.cancel()
        await eventually(lambda: engine.num_alive == 0)


async def test_classes_scores_and_ranks() -> None:
    async with serve(CLASSIFIER) as (stub, engine):
        answer = await stub.Classify(pb.ClassifyRequest(inputs=texts("a", "b"), raw_scores=True))
        assert list(answer.labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert list(answer.classifications[1].scores) == np.array([0.1, 0.7, 0.2], np.float32).tolist()
        assert engine.submitted[0].request.pooling == PoolingParams(Task.CLASSIFY, activation=False)
    async with serve(CROSS_ENCODER, length_score) as (stub, _):
        documents = ["ab", "abcdefgh", "abcd"]
        scores = await stub.Score(pb.ScoreRequest(queries=["q"], documents=documents))
        lens = [len(TOKENIZER.encode_pair("q", text)) for text in documents]
        assert list(scores.scores) == [length / 64 for length in lens]
        ranked = await stub.Rerank(pb.RerankRequest(query="q", documents=documents, top_n=2))
        assert [result.index for result in ranked.results] == [1, 2]
        error = await error_of(stub.Rerank(pb.RerankRequest(query="", documents=documents)))
        assert error.violations[0].field == "query"  # type: ignore[attr-defined]


async def test_a_stream_without_a_reader_computes_no_more_than_its_bound() -> None:
    asked = 0

    def large(request: SubmittedChoice) -> np.ndarray:
        nonlocal asked
        asked += 1
        return np.zeros((1, 1 << 20), np.float32)

    async def items() -> AsyncIterator[pb.EmbedStreamRequest]:
        for tag in range(64):
            request = pb.EmbedRequest(inputs=texts("x"), encoding=pb.EMBEDDING_ENCODING_FLOAT32_BYTES)
            yield pb.EmbedStreamRequest(tag=tag, request=request)

    async with serve(replace(EMBEDDER, embedding_size=1 << 20), large) as (stub, _):
        call = stub.EmbedStream(items())
        await eventually(lambda: asked >= 16)
        await asyncio.sleep(1.5)
        assert asked < 32, "16 answers of 4 MiB fill the bound, beside those that are in gRPC's buffers"
        tags = [response.tag async for response in call]
        assert sorted(tags) == list(range(64))


async def test_an_answer_above_the_bound_waits_for_all_others() -> None:
    unsent = UnsentAnswers(10)
    await unsent.reserve(4)
    waiting = asyncio.create_task(unsent.reserve(20))
    await asyncio.sleep(0)
    assert not waiting.done()
    unsent.release(4)
    await asyncio.wait_for(waiting, 60)


async def test_answers_of_all_calls_are_bounded_until_they_are_sent() -> None:
    def large(request: SubmittedChoice) -> np.ndarray:
        return np.zeros((1, 1 << 20), np.float32)

    packed = pb.EMBEDDING_ENCODING_FLOAT32_BYTES
    request = pb.EmbedRequest(inputs=texts("x"), encoding=packed)
    may_read = asyncio.Event()

    async def items() -> AsyncIterator[pb.EmbedStreamRequest]:
        for tag in range(16):
            yield pb.EmbedStreamRequest(tag=tag, request=request)
        await may_read.wait()

    model = replace(EMBEDDER, embedding_size=1 << 20)
    async with serve(model, large, max_unsent_bytes=64 << 20) as (stub, engine):
        stream = stub.EmbedStream(items())
        await eventually(lambda: len(engine.submitted) == 16)
        error: Any = None
        async with asyncio.timeout(60):
            while error is None:  # the first answers may fit into gRPC's buffers
                try:
                    await stub.Embed(request)
                except grpc.aio.AioRpcError as refused:
                    error = refused
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"a tenant's part, {16 << 20}, of {64 << 20}, frontend.max_unsent_bytes" in error.details()
        bystander = pb.EmbedRequest(
            inputs=texts("x"), encoding=packed, options=pb.PoolingCallOptions(tenant="bystander")
        )
        for _ in range(6):  # what one tenant does not read keeps no other from being answered
            assert len((await stub.Embed(bystander)).embeddings[0].packed) == 4 << 20
        may_read.set()
        answers = [answer async for answer in stream]
        refusals = [answer for answer in answers if answer.HasField("error")]
        assert len(answers) == 16
        assert all("frontend.max_unsent_bytes" in answer.error.message for answer in refusals)
        for _ in range(6):  # one after the other, beyond the bound: each gives its space back
            assert len((await stub.Embed(request)).embeddings[0].packed) == 4 << 20
        left = stub.EmbedStream(items())
        may_read.clear()
        await left.read()
        left.cancel()
        async with asyncio.timeout(60):
            while True:  # what the stream had is given back
                with suppress(grpc.aio.AioRpcError):
                    four = await asyncio.gather(*(stub.Embed(request) for _ in range(3)))
                    break
        assert len(four) == 3
