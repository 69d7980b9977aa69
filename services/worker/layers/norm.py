"""Root-mean-square normalisation with its weight."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from triptych_kernels.ops import rms_norm
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    parameter_target,
)


class RMSNorm(WeightedLayer):
    """`rms_norm` over the hidden size; every rank holds all of it."""

    def __init__(self, hidden_size: int, eps: float, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.weight = empty_parameter(hidden_size, context=context)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x; with a residual, normalise `x + residual` and also return that sum."""
        return rms_norm(x, self.weight, self.eps, residual)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {f"{self.prefix}.weight": parameter_target(self.weight, tuple(self.weight.shape))}
