"""The seam between a step's input and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.runner.input_batch import StepSizes


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """On the rank's device, until the next forward; work may still be in flight."""

    logits: Tensor
    """[num_sampling, vocab_size] float32."""
    token_ids: Tensor
    """[num_sampling] int64, chosen among the logits as they are; see `SamplingBatch.choose`."""
    slots: Tensor | None = None
    """[num_sampling] int64, whose they are, where `LastTokens` has kept them."""
    hidden: Tensor | None = None
    """[num_tokens or more, hidden_size] of all the step's tokens; None of a step whose rows all sample after one token:
    it scores no prompt."""


class ForwardBackend(Protocol):
    """Runs the model over one step's tokens, writing their keys and values into the cache, and samples."""

    description: str
    """What computes, in words."""
    computes_with_torch: bool
    """Whether torch computes steps on the host, all of them or in part, so that it should have threads for it."""

    def forward(self, sizes: StepSizes) -> StepOutput:
        """Compute what stands in the input buffers that the backend was made for; after an exception the same step
        may be computed again."""
        ...

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        """Return what is to be called, largest first, so that every graph stands before a step asks for it; each call
        overwrites the input buffers, and writes no key or value. Empty where nothing is recorded."""
        ...
