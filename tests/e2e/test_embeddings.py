"""Embeddings over the whole stack, held to sentence-transformers: vectors, and how alike people find two sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from triptych import LLM
from triptych.errors import TriptychError
from triptych.hub import resolve_model

pytestmark = pytest.mark.thorough

PAIRS = Path(__file__).parents[1] / "oracle" / "sentence_pairs.tsv"
"""Likeness from 0 to 5, and two sentences, in each line."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded-embedding") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> SentenceTransformer:
    return SentenceTransformer(str(resolve_model("embedded-embedding", progress=False)))


def embed(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(texts)], np.float32)


def test_vectors_and_likeness_of_a_hundred_pairs(llm, oracle):
    rows = [line.split("\t") for line in PAIRS.read_text().splitlines()]
    likeness = [float(row[0]) for row in rows]
    sides = [[row[column] for row in rows] for column in (1, 2)]
    left, right = (embed(llm, side) for side in sides)
    for ours, side in zip((left, right), sides, strict=True):
        np.testing.assert_allclose(ours, oracle.encode(side), atol=1e-5)
    assert spearmanr((left * right).sum(axis=1), likeness).statistic > 0.92


def test_texts_of_all_lengths_have_the_vectors_that_they_have_alone(llm, oracle):
    text = "the quick brown fox jumps over a lazy dog and thinks about frogs "
    texts = [text * count + "end" for count in (0, 1, 3, 9, 15)] * 5
    together = embed(llm, texts)
    np.testing.assert_allclose(together, oracle.encode(texts), atol=1e-5)
    for place in range(5):
        alone = embed(llm, [texts[place]])
        assert all(np.array_equal(alone[0], together[place + 5 * again]) for again in range(5))


def test_what_the_model_does_not_do_is_refused_by_name(llm):
    with pytest.raises(TriptychError, match="embed"):
        llm.generate("Hello")
    with pytest.raises(TriptychError, match="classify"):
        llm.classify(["Hello"])
    assert embed(llm, ["Hello"]).shape == (1, 384)
