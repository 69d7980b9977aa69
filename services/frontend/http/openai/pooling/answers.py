"""Answers as /openapi.json describes them, and how they are written: piece by piece, since vectors are long."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from triptych.types.step import F32
from triptych_services.frontend.http.answers import Answer, to_json


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


def _write(vector: F32, *, is_base64: bool) -> str:
    if is_base64:
        return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
    if vector.ndim == 1:
        return to_json(vector.tolist())
    return f"[{','.join(to_json(row) for row in map(np.ndarray.tolist, vector))}]"
