"""Scores of pairs of texts: by a classifier that reads both, or by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from triptych.errors import FeatureDisabled, FieldViolation, InvalidRequest
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import F32
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.pooled_calls import PooledText, check_num_inputs
from triptych_services.frontend.requests.inputs import Passages, PooledCall
from triptych_services.frontend.requests.raw import RawPair, RawRequest, with_remaining_time

_PAIR_SIZE = 256  # so much work is a pair, beside texts of any length: more than 16 are looked at on a thread


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The answer to a call."""

    values: Sequence[float]
    """One for each pair."""
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a call: its one query with each document, or each query with its own."""

    queries: Passages
    documents: Passages

    def check(self) -> Pairs:
        """Return these pairs.

        Raises:
            InvalidRequest: There are no texts, too many, or not as many queries as documents.
        """
        num_queries, num_documents = len(self.queries), len(self.documents)
        check_num_inputs(num_queries, self.queries.path)
        check_num_inputs(num_documents, self.documents.path)
        if num_queries not in (1, num_documents):
            why = f"{num_queries} texts are neither 1 nor as many as the {num_documents} of {self.documents.path}"
            raise InvalidRequest(
                [FieldViolation(self.queries.path, why, str(num_queries), str(num_documents))]
            )
        return self

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, place: int) -> RawPair:
        """Return a pair as a classifier's prompt."""
        return RawPair(
            self.queries[self.query_of(place)], self.documents[place], self.documents.path_of(place)
        )

    def query_of(self, place: int) -> int:
        """Return the place of the query of a pair."""
        return 0 if len(self.queries) == 1 else place


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A call that compares texts."""

    base: RawRequest
    """The request without its prompt."""
    pairs: Pairs
    activation: bool | None
    """See `PoolingParams`."""
    top_n: int | None = None
    """Documents that are returned, the best ones. None: all."""
    returns_documents: bool = False
    """Whether the answer repeats the texts of documents."""

    def since(self, arrived: float) -> Comparison:
        """Return the call with the time that is left of it, as `with_remaining_time`."""
        return replace(self, base=with_remaining_time(self.base, arrived))


async def score(generator: Generator, call: Comparison) -> Scores:
    """Return the score of each pair, higher where the second text fits the first better.

    Raises:
        FeatureDisabled: The model can compare no texts.
        TriptychError: What ends one of the requests.
    """
    base, pairs = call.base, call.pairs
    model = generator.find_model(base.model)
    if Task.CLASSIFY.label in model.tasks and model.num_labels == 1:
        base = replace(base, pooling=PoolingParams(Task.CLASSIFY, activation=call.activation))
        paths = [pairs.queries.path_of(pairs.query_of(place)) for place in range(len(pairs))]
        with closing(generator.pooled.open_answer()) as answer:  # a score is less than the vectors
            pooled = await generator.pooled.compute(PooledCall(base, pairs, paths), answer)
        return _scores([float(text.vectors[0, 0]) for text in pooled], pooled)
    if Task.EMBED.label not in model.tasks:
        tasks = ", ".join(model.tasks)
        why = f"the model {model.name!r} serves {tasks}; scores take embed, or classify with one label"
        raise FeatureDisabled("score", why)
    run = generator.text_model.run
    unlike = await run(_PAIR_SIZE * len(pairs), _find_unlike, pairs)
    base = replace(base, pooling=PoolingParams(Task.EMBED, normalize=True))
    requests = PooledCall(base, [*unlike.path_of], [*unlike.path_of.values()])
    with closing(generator.pooled.open_answer()) as answer:
        pooled = await generator.pooled.compute(requests, answer)
        size = len(pairs) * pooled[0].vectors.size
        values = await run(size, _cosines, [text.vectors[0] for text in pooled], unlike.pairs)
        return _scores(values, pooled)


class _Unlike(NamedTuple):
    """The texts of pairs that have to become vectors: each once."""

    path_of: Mapping[str, str]
    """Text -> its path, the first where there are several."""
    pairs: Sequence[tuple[int, int]]
    """The places of both texts of each pair among them."""


def _find_unlike(pairs: Pairs) -> _Unlike:
    path_of, place_of = dict[str, str](), dict[str, int]()

    def note(passages: Passages, place: int) -> int:
        text = passages[place]
        path_of.setdefault(text, passages.path_of(place))
        return place_of.setdefault(text, len(place_of))

    places = [
        (note(pairs.queries, pairs.query_of(place)), note(pairs.documents, place))
        for place in range(len(pairs))
    ]
    return _Unlike(path_of, places)


def _cosines(vectors: Sequence[F32], pairs: Sequence[tuple[int, int]]) -> list[float]:
    return [_cosine(vectors[first], vectors[second]) for first, second in pairs]


def rank(values: Sequence[float], top_n: int | None) -> list[int]:
    """Return the places of the best scores, the best first; equal ones in their order."""
    order = sorted(range(len(values)), key=lambda place: -values[place])
    return order if top_n is None else order[:top_n]


def _cosine(first: F32, second: F32) -> float:
    """Return the cosine of two vectors of length 1."""
    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def _scores(values: Sequence[float], pooled: Sequence[PooledText]) -> Scores:
    num_cached_tokens = sum(text.num_cached_tokens for text in pooled)
    return Scores(values, sum(text.num_tokens for text in pooled), num_cached_tokens)
