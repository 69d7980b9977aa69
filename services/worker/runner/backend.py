"""The interfaces between a step's gathered input and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych_services.worker.runner.base import PendingStep
from triptych_services.worker.runner.request_rows import StepRows
from triptych_services.worker.runner.step_inputs import StepSizes


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """Tensors on the rank's device, valid until the next forward. The device may still compute them."""

    logits: Tensor
    """[num_sampling, vocab_size] float32."""
    token_ids: Tensor
    """[num_sampling] int64, chosen from unchanged logits; see `SamplingBatch.choose`."""
    slots: Tensor | None = None
    """[num_sampling] int64, the slot of each token, if `LastTokens` has kept the tokens."""
    hidden: Tensor | None = None
    """[num_tokens or more, hidden_size] of all the step's tokens. None if all rows compute one token and sample, since
    such a step scores no prompt."""
    layer_states: Tensor | None = None
    """[num_tokens or more, their elements] as of `KeptStates.joined`; None: none are kept."""


def without_samples(hidden: Tensor) -> StepOutput:
    """Return the output of a step of a model without a head, of which no row samples."""
    nothing = hidden.new_zeros((0, 1), dtype=torch.float32)
    token_ids = hidden.new_zeros(0, dtype=torch.int64)
    return StepOutput(nothing, token_ids, slots=token_ids, hidden=hidden)


class ForwardBackend(Protocol):
    """Runs the model over one step's tokens, writes their keys and values into the cache, and samples."""

    description: str
    """Name for people."""
    computes_with_torch: bool
    """Whether torch computes steps on the host, at least in part, and should have threads for that."""

    def forward(self, sizes: StepSizes) -> StepOutput:
        """Compute the step in the backend's input buffers. After an exception the same step may be computed again."""
        ...

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        """Return functions that capture all graphs, one each, the largest first; empty if nothing is recorded.

        Each overwrites the input buffers, and writes no key or value.
        """
        ...


class StepLauncher(Protocol):
    """Runs gathered steps by a `ForwardBackend`, samples, and records the tokens in the rows."""

    def await_inputs(self, step: StepRows) -> None:
        """Wait for what other stages contribute to a step's inputs. Called before these are gathered."""
        ...

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> PendingStep:
        """Launch the step in the input buffers, and count its tokens as computed.

        Args:
            sizes: As `InputBuffers.gather` returned them.
            started_ns: Time at which the runner began to prepare the step, by `time.perf_counter_ns`.
        """
        ...

    def settle(self) -> None:
        """Wait for every step in flight and record its tokens."""
        ...
