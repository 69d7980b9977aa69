"""Bodies -> raw requests for vectors, scores and classes; and answers, written piece by piece, as vectors are long."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import orjson

from triptych.errors import FieldViolation, InvalidRequest
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import F32
from triptych.types.submit import RequestHead
from triptych_services.frontend.http.answers import Answer, to_json
from triptych_services.frontend.http.body import unsupported_paths
from triptych_services.frontend.http.generation import REQUEST_ID_HEADER, TIMEOUT_HEADER
from triptych_services.frontend.http.openai.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    InputsBody,
    PooledBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from triptych_services.frontend.pooled_calls import check_num_inputs
from triptych_services.frontend.requests.identity import unique_request_id
from triptych_services.frontend.requests.inputs import Passages, PooledCall
from triptych_services.frontend.requests.parse import why_not_request_id
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.sampling import pack_ids
from triptych_services.frontend.scores import Comparison, Pairs, rank


def read_embedding(
    body: EmbeddingRequest, *, label: str, deadline_s: float | None
) -> tuple[bool, PooledCall]:
    """Return whether the vectors are sent as base64, and the requests.

    Raises:
        InvalidRequest: As `embedding_params` and `input_requests`.
    """
    call = input_requests(body, embedding_params(body), label=label, deadline_s=deadline_s)
    return body.encoding_format == "base64", call


def read_pooling(
    body: PoolingRequest, *, label: str, deadline_s: float | None
) -> tuple[bool, bool, PooledCall]:
    """Return whether the vectors are sent as base64, whether a task is named, and the requests.

    Raises:
        InvalidRequest: As `embedding_params` and `input_requests`.
    """
    task = Task[body.task.upper()] if body.task is not None else Task.EMBED
    call = input_requests(body, embedding_params(body, task), label=label, deadline_s=deadline_s)
    return body.encoding_format == "base64", body.task is not None, call


def read_classification(body: ClassificationRequest, *, label: str, deadline_s: float | None) -> PooledCall:
    """Return the requests.

    Raises:
        InvalidRequest: As `input_requests`.
    """
    params = PoolingParams(Task.CLASSIFY, activation=body.activation)
    return input_requests(body, params, label=label, deadline_s=deadline_s)


def read_score(body: ScoreRequest, *, label: str, deadline_s: float | None) -> Comparison:
    """Return the call.

    Raises:
        InvalidRequest: As `base_request` and `score_pairs`.
    """
    base = base_request(body, label=label, deadline_s=deadline_s)
    return Comparison(base, score_pairs(body), body.activation)


def read_rerank(body: RerankRequest, *, label: str, deadline_s: float | None) -> Comparison:
    """Return the call.

    Raises:
        InvalidRequest: As `base_request` and `rerank_pairs`.
    """
    base = base_request(body, label=label, deadline_s=deadline_s)
    returns_documents = body.return_documents is not False
    return Comparison(base, rerank_pairs(body), body.activation, body.top_n or None, returns_documents)


def base_request(body: PooledBody, *, label: str, deadline_s: float | None) -> RawRequest:
    """Return the request without its prompt.

    Args:
        label: The X-Request-Id. Proxies give one to all calls of a user's request, so it is not unique.

    Raises:
        InvalidRequest: All that is wrong with the body.
    """
    path, names = REQUEST_ID_HEADER, [label]
    if body.request_id is not None:
        path, label, names = "request_id", body.request_id, [label, body.request_id]
    violations = list(body.violations)
    if (why := why_not_request_id(label)) is not None:
        violations.append(FieldViolation(path, why))
    if violations:
        raise InvalidRequest(violations)
    paths = {"deadline_s": TIMEOUT_HEADER}
    if not body.tenant:
        paths["tenant"] = "user"
    return RawRequest(
        api="http",
        prompt=None,
        head=RequestHead(
            unique_request_id(label),
            body.priority or 0,
            body.tenant or body.user or "",
            body.cache_salt or "",
        ),
        client_names=tuple(names),
        model=body.model or "",
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        keeps_beginning=body.truncation_side != "left",
        deadline_s=deadline_s,
        paths=paths,
        unsupported=tuple(unsupported_paths(body)),
    )


def input_requests(
    body: InputsBody, pooling: PoolingParams, *, label: str, deadline_s: float | None
) -> PooledCall:
    """Return one request for each input, in their order.

    Raises:
        InvalidRequest: All that is wrong with the body, or there are too many inputs.
    """
    base = base_request(body, label=label, deadline_s=deadline_s)
    base = replace(
        base,
        pooling=pooling,
        add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name or "",
    )
    given = body.input
    if given is None:
        raise InvalidRequest("input", "is missing; send a text, token ids, or a list of them")
    if isinstance(given, str):
        return PooledCall(base, [given], ["input"])
    if given and isinstance(given[0], int):
        return PooledCall(base, [pack_ids(given)], ["input"])
    check_num_inputs(len(given), "input")
    prompts = [
        each if isinstance(each, str) else pack_ids(each) for each in cast(list[str | list[int]], given)
    ]
    return PooledCall(base, prompts, [f"input[{place}]" for place in range(len(prompts))])


def embedding_params(body: EmbeddingRequest | PoolingRequest, task: Task = Task.EMBED) -> PoolingParams:
    """Return how the inputs become vectors.

    Raises:
        InvalidRequest: The vectors are to be shorter than 1.
    """
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidRequest("dimensions", f"{body.dimensions} is below the limit 1")
    activation = body.activation if isinstance(body, PoolingRequest) else None
    return PoolingParams(
        task, normalize=body.normalize, dimensions=body.dimensions or 0, activation=activation
    )


def score_pairs(body: ScoreRequest) -> Pairs:
    """Return the pairs of texts to compare.

    Raises:
        InvalidRequest: One of the two lists is missing, or they do not fit each other.
    """
    is_whole = body.queries is not None and body.documents is not None
    is_older = not is_whole and (body.text_1 is not None or body.text_2 is not None)
    names = ("text_1", "text_2") if is_older else ("queries", "documents")
    queries, documents = (_passages(getattr(body, name), name) for name in names)
    return Pairs(queries, documents).check()


def rerank_pairs(body: RerankRequest) -> Pairs:
    """Return the query with each document.

    Raises:
        InvalidRequest: Query or documents are missing, or there are too many.
    """
    if body.query is None:
        raise InvalidRequest("query", "is missing; send the text that documents are to fit")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n", f"{body.top_n} is below the limit 0")
    texts = [each if isinstance(each, str) else each.text for each in body.documents or ()]
    return Pairs(_passages(body.query, "query"), Passages(texts, "documents")).check()


def _passages(given: str | list[str] | None, path: str) -> Passages:
    if given is None:
        raise InvalidRequest(path, "is missing; send a text or a list of texts")
    return Passages([given], path, is_list=False) if isinstance(given, str) else Passages(given, path)


class PooledUsage(Answer):
    """Counts in tokens, over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(Answer):
    object: Literal["embedding"]
    index: int
    """Place of the input."""
    embedding: list[float] | str
    """The vector: numbers, or base64."""


class _ListAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    usage: PooledUsage


class EmbeddingAnswer(_ListAnswer):
    """The vectors."""

    data: list[EmbeddingObject]


class PoolingObject(Answer):
    object: Literal["pooling"]
    index: int
    """Place of the input."""
    data: list[float] | list[list[float]] | str
    """The vector, the vectors of all tokens, or the base64 of either."""


class PoolingAnswer(_ListAnswer):
    """The vectors or numbers of each input."""

    data: list[PoolingObject]


class ClassificationObject(Answer):
    index: int
    """Place of the input."""
    label: str
    """The label with the highest number."""
    probs: list[float]
    """One number for each label."""
    num_classes: int


class ClassificationAnswer(_ListAnswer):
    """The classes."""

    data: list[ClassificationObject]


class ScoreObject(Answer):
    object: Literal["score"]
    index: int
    """Place of the document."""
    score: float
    """Higher fits better."""


class ScoreAnswer(_ListAnswer):
    """The scores."""

    data: list[ScoreObject]


class DocumentAnswer(Answer):
    text: str


class RankObject(Answer):
    index: int
    """Place of the document in the request."""
    document: DocumentAnswer | None = None
    """Its text. Absent: it was not asked for."""
    relevance_score: float
    """Higher fits better."""


class RerankAnswer(Answer):
    """Documents, the best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RankObject]


def usage(num_tokens: int) -> dict[str, int]:
    """Return the counts of an answer."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def write_vectors(
    head: Mapping[str, Any], kind: str, field: str, vectors: Sequence[F32], *, is_base64: bool
) -> str:
    """Return an answer with vectors as JSON, written in pieces: each holds the interpreter's lock to its end.

    Args:
        head: The other fields of the answer.
        kind: `object` of each entry.
        field: Name of the vector in an entry.
        vectors: [num_inputs] each [num_columns], or [num_vectors, num_columns].
    """
    entries = (
        f'{{"object":"{kind}","index":{index},"{field}":{_write(vector, is_base64=is_base64)}}}'
        for index, vector in enumerate(vectors)
    )
    return f'{to_json(head)[:-1]},"data":[{",".join(entries)}]}}'


def write_ranks(head: Mapping[str, Any], call: Comparison, scores: Sequence[float]) -> str:
    """Return an answer with documents, the best first, as JSON, written in pieces like vectors.

    Args:
        head: The other fields of the answer.
        scores: One for each document.
    """

    def write(place: int) -> str:
        document = {"document": {"text": call.pairs.documents[place]}} if call.returns_documents else {}
        return to_json({"index": place, **document, "relevance_score": scores[place]})

    results = map(write, rank(scores, call.top_n))
    return f'{to_json(head)[:-1]},"results":[{",".join(results)}]}}'


def _write(vector: F32, *, is_base64: bool) -> str:
    if is_base64:
        return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
    assert np.isfinite(vector).all(), "a worker refuses such a vector, and JSON has no word for it"
    if vector.ndim == 1:
        return _write_row(vector)
    return f"[{','.join(map(_write_row, vector))}]"


def _write_row(row: F32) -> str:
    """Return numbers as JSON, each in as few digits as tell it from all others of 32 bits."""
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode()
