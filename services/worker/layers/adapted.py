"""The part of a layer that low-rank adapters add to: its projections under the names that a checkpoint has for them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels.weights.adapters import AdaptedRows, AdapterRef, AdapterTable
from triptych_services.worker.layers.weights import AnyWeight, WeightedLayer


@dataclass(frozen=True, slots=True)
class AdaptedPiece:
    """One projection of a layer, and this rank's share of it."""

    name: str
    """Name of its module in terms of our layers: `model.layers.0.self_attn.q_proj`."""
    shape: tuple[int, int]
    """[out_features, in_features] in the checkpoint."""
    rows: AdaptedRows
    """Its outputs among those of the layer's weight."""
    dim: int = 0
    """The axis that ranks share."""
    start: int = 0
    """Start of this rank's share on that axis."""
    length: int = 0
    """Length of this rank's share; 0: only other ranks have the projection."""

    @property
    def out_features(self) -> int:
        """Number of outputs of this rank's share."""
        return self.length if self.dim == 0 else self.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs of this rank's share."""
        return self.length if self.dim == 1 else self.shape[1]


class AdaptedLayer(WeightedLayer):
    """A layer with an output that each row's adapter changes."""

    weight: AnyWeight
    adapters: AdapterTable | None = None
    """Adapters of the layer by slot, which the `AdapterStore` sets; None: the worker serves none."""
    is_lookup = False
    """Whether inputs are ids of rows, as of an embedding."""

    @abstractmethod
    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        """Return the projections in their order; none: adapters cannot add to them on this device."""

    def adapters_of(self, slots: Tensor | None) -> AdapterRef | None:
        """Return the adapters of a step's rows.

        Args:
            slots: [num_rows] int32, -1 for none; None: no row has one.
        """
        return None if slots is None or self.adapters is None else AdapterRef(self.adapters, slots)
