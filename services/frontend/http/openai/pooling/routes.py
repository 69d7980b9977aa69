"""Routes that turn texts into vectors, scores and classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.types.pooling import Task
from triptych_services.frontend.http.answers import GENERATE_ERRORS
from triptych_services.frontend.http.document import takes
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.generation import timeout_of
from triptych_services.frontend.http.openai.pooling import convert
from triptych_services.frontend.http.openai.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PooledBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from triptych_services.frontend.http.state import generator_of, reader_of
from triptych_services.frontend.pooled_calls import AnswerBytes, PooledText
from triptych_services.frontend.requests.inputs import PooledCall
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.scores import Comparison, Scores, score

router = APIRouter(tags=["pool"])

_T = TypeVar("_T")
_LAST_BYTES = 64 << 10
"""Bytes of a body that are sent when the connection has taken those before: it buffers about as many."""


class CountedResponse(Response):
    """JSON that is counted as unsent until all but its last bytes have left for the client."""

    media_type = "application/json"

    def __init__(self, body: str | bytes | memoryview, answer: AnswerBytes) -> None:
        """
        Args:
            answer: Of the vectors, which are in the body now.

        Raises:
            QueueFull: The body is larger than they are, and too large beside other answers.
        """
        super().__init__(body)
        answer.add(len(self.body) - answer.num_bytes)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = max(len(self.body) - _LAST_BYTES, 0)
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if last:
                await send({"type": "http.response.body", "body": self.body[:last], "more_body": True})
            await send(
                {"type": "http.response.body", "body": self.body[last:]}
            )  # waits for the client to read
        finally:
            self._answer.close()


@router.post("/v1/embeddings", responses={200: {"model": convert.EmbeddingAnswer}, **GENERATE_ERRORS})
@takes(EmbeddingRequest, has_timeout=True)
async def create_embeddings(request: Request) -> Response:
    """Texts or token ids -> one vector each."""
    arrived = time.monotonic()
    is_base64, call = await _read(request, EmbeddingRequest, convert.read_embedding)
    with _answer_of(request) as answer:
        pooled = await _run(request, generator_of(request).pooled.compute(call.since(arrived), answer))
        body = await _vectors(request, call, pooled, "embedding", "embedding", is_base64=is_base64)
        return CountedResponse(body, answer)


@router.post("/pooling", responses={200: {"model": convert.PoolingAnswer}, **GENERATE_ERRORS})
@takes(PoolingRequest, has_timeout=True)
async def pool(request: Request) -> Response:
    """Texts or token ids -> what the model makes of each: a vector, one for each token, or numbers of its labels."""
    generator, arrived = generator_of(request), time.monotonic()
    is_base64, names_task, call = await _read(request, PoolingRequest, convert.read_pooling)
    if not names_task:
        tasks = generator.find_model(call.base.model).tasks
        if Task.CLASSIFY.label in tasks and Task.EMBED.label not in tasks:
            call = replace(call, base=_with_task(call.base, Task.CLASSIFY))
    with _answer_of(request) as answer:
        pooled = await _run(request, generator.pooled.compute(call.since(arrived), answer))
        body = await _vectors(request, call, pooled, "pooling", "data", is_base64=is_base64)
        return CountedResponse(body, answer)


@router.post("/classify", responses={200: {"model": convert.ClassificationAnswer}, **GENERATE_ERRORS})
@takes(ClassificationRequest, has_timeout=True)
async def classify(request: Request) -> Response:
    """Texts or token ids -> one number for each label of the model."""
    generator, arrived = generator_of(request), time.monotonic()
    call = await _read(request, ClassificationRequest, convert.read_classification)
    with _answer_of(request) as answer:
        pooled = await _run(request, generator.pooled.compute(call.since(arrived), answer))
        labels = generator.text_model.labels(pooled[0].vectors.shape[1])
        data = [
            {
                "index": index,
                "label": labels[int(np.argmax(text.vectors[0]))],
                "probs": text.vectors[0].tolist(),
                "num_classes": len(labels),
            }
            for index, text in enumerate(pooled)
        ]
        head = _head(request, "classify", call.base.model, _count(pooled))
        return CountedResponse(json_response(head | {"data": data}).body, answer)


@router.post("/score", responses={200: {"model": convert.ScoreAnswer}, **GENERATE_ERRORS})
@router.post("/v1/score", responses={200: {"model": convert.ScoreAnswer}, **GENERATE_ERRORS})
@takes(ScoreRequest, has_timeout=True)
async def create_scores(request: Request) -> Response:
    """Pairs of texts -> how well the second of each fits the first."""
    call, scores = await _compare(request, ScoreRequest, convert.read_score)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)]
    return json_response(_head(request, "score", call.base.model, scores.num_tokens) | {"data": data})


@router.post("/rerank", responses={200: {"model": convert.RerankAnswer}, **GENERATE_ERRORS})
@router.post("/v1/rerank", responses={200: {"model": convert.RerankAnswer}, **GENERATE_ERRORS})
@router.post("/v2/rerank", responses={200: {"model": convert.RerankAnswer}, **GENERATE_ERRORS})
@takes(RerankRequest, has_timeout=True)
async def rerank(request: Request) -> Response:
    """A query and documents -> the documents in the order in which they fit it, as Jina's and Cohere's clients ask."""
    call, scores = await _compare(request, RerankRequest, convert.read_rerank)
    head = _head(request, "rerank", call.base.model, scores.num_tokens)
    head = {name: head[name] for name in ("id", "model", "usage")}
    size = scores.num_tokens if call.returns_documents else len(scores.values)
    body = await generator_of(request).text_model.run(size, convert.write_ranks, head, call, scores.values)
    return Response(body, media_type="application/json")


@contextmanager
def _answer_of(request: Request) -> Iterator[AnswerBytes]:
    """Count the bytes of an answer, which a `CountedResponse` closes, or what ends the call before."""
    answer = generator_of(request).pooled.open_answer()
    try:
        yield answer
    except BaseException:
        answer.close()
        raise


_B = TypeVar("_B", bound=PooledBody)


async def _read(request: Request, kind: type[_B], convert_body: Callable[..., _T]) -> _T:
    """Return what `convert_body` makes of a body, the name of the request and its deadline."""
    deadline_s = timeout_of(request)
    convert_named = partial(convert_body, label=request.state.request_id, deadline_s=deadline_s)
    return await reader_of(request).read(request, kind, convert_named, deadline_s=deadline_s)


async def _compare(
    request: Request, kind: type[_B], read: Callable[..., Comparison]
) -> tuple[Comparison, Scores]:
    """Read a call that compares texts, and return it with the scores of its pairs."""
    arrived = time.monotonic()
    call = (await _read(request, kind, read)).since(arrived)
    return call, await _run(request, score(generator_of(request), call))


def _with_task(raw: RawRequest, task: Task) -> RawRequest:
    assert raw.pooling is not None, "it becomes vectors"
    return replace(raw, pooling=replace(raw.pooling, task=task))


async def _run(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await the work of a call, and end it as soon as its client leaves."""
    result: _T = await request.app.state.in_flight.run(request.receive, work)
    return result


async def _vectors(
    request: Request,
    call: PooledCall,
    pooled: Sequence[PooledText],
    kind: str,
    field: str,
    *,
    is_base64: bool,
) -> str:
    """Return the body of the answer to a call for vectors, written on a thread if it is long."""
    assert call.base.pooling is not None, "it becomes vectors"
    is_whole = call.base.pooling.task is Task.TOKEN_EMBED
    vectors = [text.vectors if is_whole else text.vectors[0] for text in pooled]
    head = _head(request, "embd" if kind == "embedding" else "pool", call.base.model, _count(pooled))
    size = sum(vector.size for vector in vectors)
    text = generator_of(request).text_model
    return await text.run(size, convert.write_vectors, head, kind, field, vectors, is_base64=is_base64)


def _head(request: Request, prefix: str, model: str, num_tokens: int) -> dict[str, Any]:
    """Return the fields that all answers have."""
    return {
        "id": f"{prefix}-{request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model or generator_of(request).find_model("").name,
        "usage": convert.usage(num_tokens),
    }


def _count(pooled: Sequence[PooledText]) -> int:
    return sum(text.num_tokens for text in pooled)
