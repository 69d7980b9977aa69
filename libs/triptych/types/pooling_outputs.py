"""Results of `LLM.embed`, `encode`, `classify` and `score`, one for each input, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from triptych.types.step import F32

_Output = TypeVar("_Output")


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """The vectors of all tokens of one input."""

    data: F32
    """[num_tokens, num_columns]"""


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """One number for each label."""

    probs: list[float]
    labels: tuple[str, ...]
    """Names of the labels, as the checkpoint has them."""

    @property
    def num_classes(self) -> int:
        """Labels of the model."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The label with the highest number."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


@dataclass(frozen=True, slots=True, eq=False)
class ScoringOutput:
    """How well a document fits its query."""

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class PooledRequestOutput(Generic[_Output]):
    """The result of one input."""

    outputs: _Output
    num_prompt_tokens: int = 0
    """Tokens of the input; 0 where they are not counted for each."""
    finished: bool = True
