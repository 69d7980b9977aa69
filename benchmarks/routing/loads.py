"""Loads that routing policies differ on. A user sends prompts one after the other, each behind all that was said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Tokens = np.ndarray
"""Token ids, uint32 [n]."""
VOCABULARY = (1000, 40000)
"""The first token that prompts have, and the first behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The next words of a user."""

    tokens: Tokens
    num_output_tokens: int
    pause_s: float
    """Seconds since the last answer; of the first turn, since the load began."""


@dataclass(frozen=True, slots=True, eq=False)
class User:
    """A conversation, or one question."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load."""

    name: str
    users: Callable[[np.random.Generator, int, float], Iterator[User]]
    """Random numbers, engines and seconds -> users; their first turns come within these seconds."""


def _words(rng: np.random.Generator, low: int, high: int) -> Tokens:
    return rng.integers(*VOCABULARY, int(rng.integers(low, high + 1))).astype(np.uint32)


def _arrivals(rng: np.random.Generator, per_s: float, seconds: float) -> Iterator[float]:
    """Yield times of independent arrivals."""
    now = rng.exponential(1 / per_s)
    while now < seconds:
        yield now
        now += rng.exponential(1 / per_s)


def _multi_turn(rng: np.random.Generator, num_engines: int, seconds: float) -> Iterator[User]:
    """Six turns; the first one is long, as with a file or a page in it."""
    for start_s in _arrivals(rng, 2.0 * num_engines, seconds):
        turns = [Turn(_words(rng, 600, 1800), int(rng.integers(20, 60)), start_s)]
        for _ in range(5):
            turns.append(Turn(_words(rng, 20, 120), int(rng.integers(20, 60)), rng.exponential(3.0)))
        yield User(tuple(turns))


def _hot_prompt(rng: np.random.Generator, num_engines: int, seconds: float) -> Iterator[User]:
    """One system prompt for all."""
    system = _words(rng, 3000, 3000)
    for start_s in _arrivals(rng, 12 * num_engines, seconds):
        question = np.concatenate([system, _words(rng, 20, 200)])
        yield User((Turn(question, int(rng.integers(20, 60)), start_s),))


def _documents(rng: np.random.Generator, num_engines: int, seconds: float) -> Iterator[User]:
    """Questions about documents, some of which many ask about. The caches together hold most, one of them few."""
    documents = [_words(rng, 1000, 3000) for _ in range(24 * num_engines)]
    shares = 1 / np.arange(1, len(documents) + 1) ** 0.8
    shares /= shares.sum()
    for start_s in _arrivals(rng, 5 * num_engines, seconds):
        document = documents[int(rng.choice(len(documents), p=shares))]
        question = np.concatenate([document, _words(rng, 20, 100)])
        yield User((Turn(question, int(rng.integers(20, 60)), start_s),))


def _unique(rng: np.random.Generator, num_engines: int, seconds: float) -> Iterator[User]:
    """Prompts of very different lengths that have not been sent before."""
    for start_s in _arrivals(rng, 8 * num_engines, seconds):
        length = int(np.clip(rng.lognormal(6.6, 0.8), 50, 6000))
        yield User((Turn(_words(rng, length, length), int(rng.integers(20, 60)), start_s),))


LOADS = (
    Load("multi-turn", _multi_turn),
    Load("hot prompt", _hot_prompt),
    Load("documents", _documents),
    Load("unique", _unique),
)
