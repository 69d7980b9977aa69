"""Communication between the ranks that compute one model together, as a layer uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from triptych.types.step import StepResult


class ExpectedResult(Protocol):
    """The result of a step that a later stage still computes."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Wait for the result.

        Raises:
            RankUnavailable: The last stage is gone, or did not answer in time.
        """
        ...


class StageLink(Protocol):
    """The connections of one stage to those beside it, each to the rank with the same share of every layer.

    first stage ──states──► next stage ──states──► last stage
         ▲                                             │
         └──────────────────result─────────────────────┘

    Stages compute the same steps in the same order, so messages need no names.
    """

    def send_states(self, states: Tensor) -> None:
        """Send what this stage has computed to the next one, without waiting until it takes it.

        Args:
            states: [num_tokens, hidden_size] float32; may be overwritten after the call.

        Raises:
            RankUnavailable: The next stage is gone, or takes nothing.
        """
        ...

    def receive_states(self, states: Tensor) -> None:
        """Fill `states` with what the stage before has sent.

        On an asynchronous device this is launched on the current stream, and the host does not wait.

        Args:
            states: [num_tokens, hidden_size] float32.

        Raises:
            RankUnavailable: The stage before is gone, or did not send in time.
        """
        ...

    def send_result(self, result: StepResult) -> None:
        """Send a step's result from the last stage to the first, without waiting until it takes it."""
        ...

    def expect_result(self) -> ExpectedResult:
        """Return the result of the first stage's next step, to be waited for."""
        ...


class RankGroup(Protocol):
    """The ranks of one model, of which this process is one. All of them call the same methods in the same order.

    Those that share layers, the ranks of one stage, also call the sums in the same order.
    """

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share this rank's layers, itself included."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether sums and gathers can be part of a recorded program of native kernels."""
        ...

    @property
    def stages(self) -> StageLink | None:
        """The connections to other stages; None if there is only one."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks that share layers, in its own memory, with the same bits on each of them.

        On an asynchronous device the sum is launched on the current stream, and the host does not wait.

        Raises:
            RankUnavailable: Another rank is gone, or did not come in time.
        """
        ...

    def all_gather(self, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Put the columns of the ranks that share layers side by side, in a new tensor; otherwise as `all_reduce`.

        Args:
            tensor: [num_rows, lengths[tensor_parallel_rank]], of the same type and number of rows on all ranks.
            lengths: Number of columns of each rank.

        Returns:
            [num_rows, sum of lengths].
        """
        ...

    def minimum(self, number: int) -> int:
        """Return the least number that any rank passes. Waits for all ranks."""
        ...

    def exchange(self, text: str) -> list[str]:
        """Return the texts that the ranks pass, by rank. Waits for all ranks."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Enclose one step.

        A step that fails may leave operations half done, in which other ranks still wait. No operation of a later step
        may complete them, so all later steps are refused.

        Raises:
            RankUnavailable: An earlier step failed.
        """
        ...

    def close(self) -> None:
        """Leave the group, in a process that goes on without it.

        NCCL waits until no CUDA graph contains its operations.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """The `RankGroup` of a model that one process computes."""

    rank: int = 0
    size: int = 1
    tensor_parallel_size: int = 1
    is_recordable: bool = True
    stages: StageLink | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return tensor

    def minimum(self, number: int) -> int:
        return number

    def exchange(self, text: str) -> list[str]:
        return [text]

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return None
