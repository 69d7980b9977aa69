"""The weights of one product of all experts, as views into tensors that one launch reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from triptych_kernels.triton.moe.routing import Routing
from triptych_kernels.weights.base import LinearWeight


class ExpertStack(Sequence[LinearWeight]):
    """The weights of one product of all experts. They are filled one by one while loading, and multiplied together.

    The stacks of a mixture's two products have one class and the same options, so that they need the same tiles.
    """

    def __init__(self, experts: Sequence[LinearWeight]) -> None:
        self._experts = tuple(experts)

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, index: Any) -> Any:
        return self._experts[index]

    @abstractmethod
    def block_m(self, rows_per_expert: float) -> int:
        """Return the rows of a tile of the products, for which the routing is computed.

        Args:
            rows_per_expert: Mean number of rows of an expert.
        """

    @abstractmethod
    def gate_up(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute `silu(gate) * up` of each pair, [num_pairs, intermediate_size] in x's dtype.

        Args:
            x: [num_tokens, hidden_size], the last axis contiguous.
        """

    @abstractmethod
    def down(self, activated: Tensor, routing: Routing, weighted: Tensor) -> None:
        """Write each pair's result times its probability to `weighted` [num_pairs, hidden_size].

        Args:
            activated: Result of `gate_up`.
        """
