"""The purpose of a row, and how a row that is pooled becomes a vector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Task(Enum):
    """The purpose of a row. A row that does not generate is pooled: it samples nothing, and reports vectors."""

    GENERATE = auto()
    """Tokens that continue its prompt."""
    EMBED = auto()
    """One vector of its text."""
    TOKEN_EMBED = auto()
    """One vector for each of its tokens."""
    CLASSIFY = auto()
    """One number for each label of the model's classifier."""

    @property
    def label(self) -> str:
        """Its name in facts and messages for people: embed, token_embed."""
        return self.name.lower()


class PoolingKind(Enum):
    """The way from the states of a text's tokens to one vector."""

    FIRST = auto()
    """The state of its first token, as models with a CLS token have it."""
    LAST = auto()
    """The state of its last token."""
    MEAN = auto()
    """The mean of the states of all tokens."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """The wishes of a client for a pooled row. None and 0: as the model has it."""

    task: Task = Task.EMBED
    """Any but `GENERATE`."""
    kind: PoolingKind | None = None
    normalize: bool | None = None
    """Whether vectors are scaled to length 1."""
    dimensions: int = 0
    """Numbers of a vector that are kept, the first ones; scaled after that."""
    activation: bool | None = None
    """Whether the numbers of a classifier are made into probabilities."""


GENERATION = Task.GENERATE.label
"""Name of the task that every decoder has."""
