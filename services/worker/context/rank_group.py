"""Communication between the ranks that compute one model together, as a layer uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """The ranks of one model, of which this process is one. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in its own memory, with the same bits on every rank.

        On an asynchronous device the sum is launched on the current stream, and the host does not wait.

        Raises:
            RankUnavailable: Another rank is gone, or did not come in time.
        """
        ...

    def all_gather(self, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Put the columns of all ranks side by side, in a new tensor; otherwise as `all_reduce`.

        Args:
            tensor: [num_rows, lengths[rank]], of the same type and number of rows on all ranks.
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
