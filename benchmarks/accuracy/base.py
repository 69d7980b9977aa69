"""Interface of the engines that score given continuations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from tests.oracle.entries import Entry


class Pass(Enum):
    """Steps in which an engine computes a sequence: it may compute one row in another way than many.

    whole:   [p p p p t t t]           prompt and continuation in one step, like a prompt
    tokens:  [p p p p] [t] [t] [t]     the prompt in one step, then each token in a step of its own, as served
    """

    WHOLE = "whole"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """An engine's opinion of one continuation, each token given all before it."""

    logprobs: np.ndarray
    """[num_tokens] float64 log-probability of each token."""
    is_best: np.ndarray
    """[num_tokens] bool: no other token was likelier, so greedy decoding would have chosen it."""


class Scorer(Protocol):
    """An engine in one mode, not loaded yet."""

    @property
    def name(self) -> str:
        """Name of its row in the table."""
        ...

    def score(self, entries: Sequence[Entry]) -> Iterator[tuple[Pass, list[Scores]]]:
        """Load the model, and yield for each pass that the engine offers the scores of every entry.

        Raises:
            Exception: It cannot run here; the message says why.
        """
        ...
