"""What a layer asks of the ranks that compute it together; the worker connects them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol


class RankGroup(Protocol):
    """The ranks of one model, of which this process is one. All of them call the same methods in the same order.

    Tensors are torch's, which this package does not import.
    """

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, tensor: Any) -> Any:
        """The sum over ranks, in the memory of `tensor`, and with the same bits on every rank.

        On an asynchronous device it is launched on the current stream, and the host does not wait.

        Raises:
            RankUnavailable: another rank is gone, or did not come in time.
        """
        ...

    def all_gather(self, tensor: Any, lengths: tuple[int, ...]) -> Any:
        """Every rank's columns beside each other, a new tensor; otherwise as `all_reduce`.

        Args:
            tensor: [num_rows, lengths[rank]], of the same type and number of rows on all ranks.
            lengths: of each rank's part.
        Returns:
            [num_rows, sum of lengths].
        """
        ...

    def minimum(self, number: int) -> int:
        """The least that any rank has to offer; waits for all of them."""
        ...

    def exchange(self, text: str) -> list[str]:
        """What each rank says, by rank; waits for all of them."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Around each step. What fails here may leave operations half done that other ranks still wait in: no later
        one may be taken for its other half, so the steps after are refused.

        Raises:
            RankUnavailable: a step before failed.
        """
        ...

    def close(self) -> None:
        """Leave the group, where the process goes on without it. NCCL waits until no CUDA graph holds its
        operations."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A `RankGroup` of this process alone, which has nobody to ask."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Any, lengths: tuple[int, ...]) -> Any:
        return tensor

    def minimum(self, number: int) -> int:
        return number

    def exchange(self, text: str) -> list[str]:
        return [text]

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return None
