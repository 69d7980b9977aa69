"""Scores of pairs of texts: by a classifier that reads both, or by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from triptych.errors import FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import F32
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.pooled_calls import PooledText, check_num_inputs
from triptych_services.frontend.requests.raw import RawPair, RawPrompt, RawRequest


@dataclass(frozen=True, slots=True)
class Passage:
    """One text of a call, and its path in the client's words."""

    text: str
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The answer to a call."""

    values: Sequence[float]
    """One for each pair."""
    num_tokens: int
    num_cached_tokens: int


def pair_up(
    queries: Sequence[Passage], documents: Sequence[Passage], queries_path: str, documents_path: str
) -> list[tuple[Passage, Passage]]:
    """Return the pairs of a call: its one query with each document, or each query with its own.

    Raises:
        InvalidRequest: There are no texts, too many, or not as many queries as documents.
    """
    check_num_inputs(len(queries), queries_path)
    check_num_inputs(len(documents), documents_path)
    if len(queries) not in (1, len(documents)):
        why = f"{len(queries)} texts are neither 1 nor as many as the {len(documents)} of {documents_path}"
        raise InvalidRequest([FieldViolation(queries_path, why, str(len(queries)), str(len(documents)))])
    return [
        (queries[0] if len(queries) == 1 else queries[i], document) for i, document in enumerate(documents)
    ]


async def score(
    generator: Generator,
    base: RawRequest,
    pairs: Sequence[tuple[Passage, Passage]],
    *,
    activation: bool | None = None,
) -> Scores:
    """Return the score of each pair, higher where the second text fits the first better.

    Args:
        base: The request without its prompt.
        activation: See `PoolingParams`.

    Raises:
        FeatureDisabled: The model can compare no texts.
        TriptychError: What ends one of the requests.
    """
    model = generator.find_model(base.model)
    if Task.CLASSIFY.label in model.tasks and model.num_labels == 1:
        pooling = PoolingParams(Task.CLASSIFY, activation=activation)
        raws = number_requests(
            base,
            pooling,
            [(RawPair(first.text, second.text, second.path), first.path) for first, second in pairs],
        )
        with closing(generator.pooled.open_answer()) as answer:  # a score is less than the vectors
            pooled = await generator.pooled.compute(raws, answer)
        return _scores([float(text.vectors[0, 0]) for text in pooled], pooled)
    if Task.EMBED.label not in model.tasks:
        tasks = ", ".join(model.tasks)
        why = f"the model {model.name!r} serves {tasks}; scores take embed, or classify with one label"
        raise FeatureDisabled("score", why)
    texts = {passage.text: passage for pair in pairs for passage in pair}
    places = {text: place for place, text in enumerate(texts)}
    pooling = PoolingParams(Task.EMBED, normalize=True)
    inputs = [(passage.text, passage.path) for passage in texts.values()]
    with closing(generator.pooled.open_answer()) as answer:
        pooled = await generator.pooled.compute(number_requests(base, pooling, inputs), answer)
        vectors = [text.vectors[0] for text in pooled]
        values = [
            _cosine(vectors[places[first.text]], vectors[places[second.text]]) for first, second in pairs
        ]
        return _scores(values, pooled)


def rank(values: Sequence[float], top_n: int | None) -> list[int]:
    """Return the places of the best scores, the best first; equal ones in their order."""
    order = sorted(range(len(values)), key=lambda place: -values[place])
    return order if top_n is None else order[:top_n]


def number_requests(
    base: RawRequest, pooling: PoolingParams, inputs: Sequence[tuple[RawPrompt, str]]
) -> list[RawRequest]:
    """Return one request for each input of a call. Their ids are numbered where there are several.

    Args:
        base: The request without its prompt.
        inputs: Prompt and path of each.
    """
    request_id, is_lone = base.head.request_id, len(inputs) == 1
    return [
        replace(
            base,
            prompt=prompt,
            pooling=pooling,
            head=base.head
            if is_lone or not request_id
            else replace(base.head, request_id=f"{request_id}-{place}"),
            paths={**base.paths, "prompt": path},
        )
        for place, (prompt, path) in enumerate(inputs)
    ]


def _cosine(first: F32, second: F32) -> float:
    """Return the cosine of two vectors of length 1."""
    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def _scores(values: Sequence[float], pooled: Sequence[PooledText]) -> Scores:
    num_cached_tokens = sum(text.num_cached_tokens for text in pooled)
    return Scores(values, sum(text.num_tokens for text in pooled), num_cached_tokens)
