"""Vectors, scores and classes over HTTP, with the official client and in raw requests, before a fake engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import MODEL, FakeEngine, SubmittedChoice
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import DEADLINE_S, HttpApi, open_api
from triptych.types.pooling import PoolingParams, Task
from triptych_services.frontend.http.connections import ConnectionLimits
from triptych_services.frontend.http.openai.pooling.convert import write_vectors

TOKENIZER = byte_tokenizer()
EMBEDDER = replace(MODEL, tasks=("embed", "token_embed"), embedding_size=4)
CLASSIFIER = replace(MODEL, tasks=("classify",), num_labels=3)
CROSS_ENCODER = replace(MODEL, tasks=("classify",), num_labels=1)


def pool(request: SubmittedChoice) -> np.ndarray:
    """Vectors that depend on the tokens alone."""
    params, ids = request.request.pooling, request.token_ids.astype(np.float32)
    if params.task is Task.TOKEN_EMBED:
        return np.stack([ids, ids + 0.1], axis=1).astype(np.float32)
    if params.task is Task.CLASSIFY:
        return np.array([[0.1, 0.7, 0.2]], np.float32)
    vector = np.array([ids.sum(), ids[0], ids[-1], len(ids)], np.float32) / np.float32(3)
    vector = vector[: params.dimensions or None]
    return (vector / np.linalg.norm(vector) if params.normalize else vector)[None]


def length_score(request: SubmittedChoice) -> np.ndarray:
    return np.array([[len(request.token_ids) / 64]], np.float32)


@asynccontextmanager
async def serve(
    model: Any = EMBEDDER, pool: Any = pool, limits: ConnectionLimits | None = None, **options: Any
) -> AsyncIterator[tuple[HttpApi, FakeEngine]]:
    async with (
        FakeEngine(model=model, pool=pool) as engine,
        frontend_core(engine, directory=Path("no-checkpoint"), **options) as core,
        open_api(core.generator, limits=limits) as api,
    ):
        yield api, engine


def expected(text: str) -> list[float]:
    ids = np.array(TOKENIZER.encode(text), np.float32)
    return (np.array([ids.sum(), ids[0], ids[-1], len(ids)], np.float32) / np.float32(3)).tolist()


def written(text: str) -> list[float]:
    """The same as JSON has it: in as few digits as tell each number from all others of 32 bits."""
    return [float(str(value)) for value in np.array(expected(text), np.float32)]


async def test_the_official_client_embeds_texts_and_ids() -> None:
    async with serve() as (api, engine):
        one = await api.client.embeddings.create(model="tiny", input="Hello")
        assert one.data[0].embedding == expected("Hello")
        assert (one.object, one.model, one.data[0].object, one.data[0].index) == (
            "list",
            "tiny",
            "embedding",
            0,
        )
        several = await api.client.embeddings.create(
            model="tiny", input=["Hello", "world"], encoding_format="float", user="me"
        )
        assert [each.embedding for each in several.data] == [written("Hello"), written("world")]
        num_tokens = len(TOKENIZER.encode("Hello")) + len(TOKENIZER.encode("world"))
        assert (several.usage.prompt_tokens, several.usage.total_tokens) == (num_tokens, num_tokens)
        ids = TOKENIZER.encode("abc")
        for given in (ids, [ids]):
            got = await api.client.embeddings.create(model="tiny", input=given)
            assert got.data[0].embedding == expected("abc")
        await api.client.embeddings.create(model="tiny", input="Hello", dimensions=2)
        assert engine.submitted[-1].request.pooling == PoolingParams(Task.EMBED, dimensions=2)
        assert engine.submitted[1].request.head.tenant == "me"


async def test_base64_holds_the_same_bits_as_numbers() -> None:
    async with serve() as (api, _):
        body = {"input": ["Hello", "x"], "model": "tiny"}
        plain = (await api.http.post("/v1/embeddings", json=body)).json()
        packed = (await api.http.post("/v1/embeddings", json=body | {"encoding_format": "base64"})).json()
        for one, other in zip(plain["data"], packed["data"], strict=True):
            vector = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
            assert vector.tobytes() == np.array(one["embedding"], np.float32).tobytes()


def test_numbers_in_json_are_the_bits_that_were_computed() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    vector = words.view(np.float32)
    vector = vector[np.isfinite(vector)]
    (entry,) = json.loads(
        write_vectors({"object": "list"}, "embedding", "embedding", [vector], is_base64=False)
    )["data"]
    assert np.array(entry["embedding"], np.float32).tobytes() == vector.tobytes()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ["x"] * 100_000}, "input", "100000 texts are above the limit 2048"),
        ({"input": []}, "input", "at least 1 is needed"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": [[1], [1, 999]]}, "input[1][1]", "999"),
        ({"input": {"text": "x"}}, "input", "must be a string"),
        ({}, "input", "missing"),
        ({"input": [7] * 65}, "input", "maximum context length is 64 tokens"),
        ({"input": ["a", "b" * 200]}, "input[1]", "maximum context length is 64 tokens"),
        ({"input": "x", "dimensions": 5}, "dimensions", "5 is not within 1..4"),
        ({"input": "x", "dimensions": 0}, "dimensions", "0 is below the limit 1"),
        ({"input": "x", "encoding_format": "int3"}, "encoding_format", "int3"),
        ({"input": "x", "colour": 1}, "colour", "no such field"),
        ({"input": "x", "prompt_name": "poem"}, "prompt_name", "poem"),
    ],
)
async def test_bad_inputs_are_named_and_a_bystander_goes_on(
    body: dict[str, Any], param: str, words: str
) -> None:
    async with serve() as (api, _):
        bystander = asyncio.create_task(api.client.embeddings.create(model="tiny", input=["fine"] * 40))
        answer = await api.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
        assert len((await bystander).data) == 40


async def test_models_without_the_task_say_what_they_serve() -> None:
    async with serve(MODEL) as (api, _):
        with pytest.raises(openai.APIStatusError, match="serves generate") as caught:
            await api.client.embeddings.create(model="tiny", input="x")
        assert caught.value.status_code in (400, 501)
        with pytest.raises(openai.NotFoundError):
            await api.client.embeddings.create(model="other", input="x")
    async with serve() as (api, _):
        with pytest.raises(openai.APIStatusError, match="serves embed, token_embed"):
            await api.client.completions.create(model="tiny", prompt="x")


async def test_pooling_returns_vectors_of_tokens() -> None:
    async with serve() as (api, _):
        answer = (await api.http.post("/pooling", json={"input": "abc", "task": "token_embed"})).json()
        assert [row[0] for row in answer["data"][0]["data"]] == TOKENIZER.encode("abc")
        answer = (await api.http.post("/pooling", json={"input": "abc"})).json()
        assert answer["data"] == [{"object": "pooling", "index": 0, "data": written("abc")}]


async def test_classes_have_labels() -> None:
    async with serve(CLASSIFIER) as (api, engine):
        answer = (await api.http.post("/classify", json={"input": ["a", "b"], "activation": False})).json()
        assert [each["label"] for each in answer["data"]] == ["LABEL_1", "LABEL_1"]
        assert answer["data"][0]["num_classes"] == 3
        assert answer["data"][0]["probs"] == np.array([0.1, 0.7, 0.2], np.float32).tolist()
        assert engine.submitted[0].request.pooling == PoolingParams(Task.CLASSIFY, activation=False)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_a_cross_encoder_orders_documents(path: str) -> None:
    async with serve(CROSS_ENCODER, length_score) as (api, engine):
        documents: list[Any] = [{"text": "ab"}, {"text": "abcdefgh"}, "abcd"]
        body = {"model": "tiny", "query": "q", "documents": documents, "top_n": 2}
        answer = (await api.http.post(path, json=body)).json()
        assert [each["index"] for each in answer["results"]] == [1, 2]
        assert answer["results"][0]["document"] == {"text": "abcdefgh"}
        assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"]
        assert sorted(request.token_ids.tolist() for request in engine.submitted) == sorted(
            TOKENIZER.encode_pair("q", text) for text in ("ab", "abcdefgh", "abcd")
        )


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_an_embedder_scores_by_the_cosine(path: str) -> None:
    async with serve() as (api, engine):
        body = {"text_1": "abc", "text_2": ["abc", "zzz"]}
        answer = (await api.http.post(path, json=body)).json()
        first, second = (np.array(expected(text)) for text in ("abc", "zzz"))
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        scores = [each["score"] for each in answer["data"]]
        np.testing.assert_allclose(scores, [1, cosine], rtol=1e-6)
        assert len(engine.submitted) == 2  # the same text is embedded once
        pairs = (await api.http.post(path, json={"queries": ["a", "b"], "documents": ["a", "b"]})).json()
        np.testing.assert_allclose([each["score"] for each in pairs["data"]], [1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["x"] * 3000}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x"], "top_n": -1}, "top_n"),
    ],
)
async def test_bad_comparisons_are_named(path: str, body: dict[str, Any], param: str) -> None:
    async with serve() as (api, _):
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


LARGE = 1 << 20
"""Numbers of a vector of 4 MiB, in base64 5.6 MB: more than the buffers of a connection on loopback take."""


def large(request: SubmittedChoice) -> np.ndarray:
    return np.ones((1, LARGE), np.float32)


async def until_served(api: HttpApi, body: object) -> None:
    """Ask again until others' answers leave space for one."""
    async with asyncio.timeout(DEADLINE_S):
        while (await api.http.post("/v1/embeddings", json=body)).status_code != 200:
            await asyncio.sleep(0.05)


async def test_answers_that_are_not_read_are_bounded_together() -> None:
    body = {"input": "x", "model": "tiny", "encoding_format": "base64"}
    model = replace(EMBEDDER, embedding_size=LARGE)
    async with serve(model, large, max_unsent_bytes=80 << 20) as (api, engine):
        unread = []
        for number in range(3):  # 16.8 MB
            unread.append(await api.connect("/v1/embeddings", body))
            assert b" 200 " in await unread[-1][0].readline()
            assert len(engine.submitted) == number + 1
        refused = await api.http.post("/v1/embeddings", json=body)
        assert refused.status_code == 429
        assert "frontend.max_unsent_bytes" in refused.json()["error"]["message"]
        assert str(20 << 20) in refused.json()["error"]["message"]
        bystander = body | {"tenant": "bystander"}
        assert (await api.http.post("/v1/embeddings", json=bystander)).status_code == 200
        for path, more in (("/pooling", {}), ("/score", {"text_1": "x", "text_2": ["y", "z"]})):
            given = {"model": "tiny", **more} if more else body
            assert (await api.http.post(path, json=given)).status_code == 429, path
        reader, writer = unread[0]
        piece = b""
        while not piece.endswith(b"}"):
            piece = await reader.read(1 << 16)
        assert (await api.http.post("/v1/embeddings", json=body)).status_code == 200
        unread[1][1].close()  # one that is given up has space, too
        writer.close()
        await until_served(api, body)


async def test_answers_that_are_never_read_give_their_space_back() -> None:
    body = {"input": "x", "model": "tiny", "encoding_format": "base64"}
    limits = ConnectionLimits(client_timeout_s=60.0)
    model = replace(EMBEDDER, embedding_size=LARGE)
    async with serve(model, large, limits, max_unsent_bytes=64 << 20) as (api, _):
        unread = [await api.connect("/v1/embeddings", body) for _ in range(2)]
        for reader, _ in unread:
            assert b" 200 " in await reader.readline()
        assert (await api.http.post("/v1/embeddings", json=body)).status_code == 429
        for _ in range(10):  # what reaches the kernel of either side counts as read
            await pass_time(60.0)
            await asyncio.sleep(0.01)
        await until_served(api, body)
        for _ in range(5):  # beyond the bound, one after the other: nothing is counted for ever
            assert (await api.http.post("/v1/embeddings", json=body)).status_code == 200
