"""Normalisation with its weight: by the root of the mean square, or with the mean subtracted first."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import NormSpec
from triptych.errors import FeatureDisabled
from triptych_kernels.ops import layer_norm, rms_norm
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    parameter_target,
)


class RMSNorm(WeightedLayer):
    """`rms_norm` over the last axis, with the result in the model's precision; every rank holds all of it."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        weight: bool = True,
        offset: float = 0.0,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            weight: Whether there is one; if not, the vector is normalised and no more.
            offset: Added to the stored weight.
        """
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.offset = offset
        self.out_dtype = context.dtype
        self.weight = _empty_weight(size, offset=offset, context=context) if weight else None

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x; with a residual, normalise `x + residual` and also return that sum."""
        return rms_norm(x, self.weight, self.eps, residual, out_dtype=self.out_dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        if self.weight is None:
            return {}
        return {f"{self.prefix}.weight": _offset_target(self.weight, self.offset)}


class LayerNorm(WeightedLayer):
    """`layer_norm` over the last axis, with the result in the model's precision; every rank holds all of it."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        bias: bool,
        weight: bool = True,
        offset: float = 0.0,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            bias: Whether there is one; only beside a weight.
            weight: Whether there is one; if not, the vector is normalised and no more.
            offset: Added to the stored weight.
        """
        super().__init__()
        assert weight or not bias, f"{prefix}: a bias without a weight"
        self.prefix = prefix
        self.eps = eps
        self.offset = offset
        self.out_dtype = context.dtype
        self.weight = _empty_weight(size, offset=offset, context=context) if weight else None
        self.bias = _empty_weight(size, offset=offset, context=context) if bias else None

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x; with a residual, normalise `x + residual` and also return that sum."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual, out_dtype=self.out_dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        if self.weight is not None:
            targets[f"{self.prefix}.weight"] = _offset_target(self.weight, self.offset)
        if self.bias is not None:
            targets[f"{self.prefix}.bias"] = parameter_target(self.bias, tuple(self.bias.shape))
        return targets


def create_norm(size: int, spec: NormSpec, *, context: ModelContext, prefix: str) -> RMSNorm | LayerNorm:
    """Return the layer that a checkpoint's architecture asks for.

    Args:
        size: Length of the last axis of what is normalised.
        prefix: Name of the norm in the checkpoint.
    Raises:
        FeatureDisabled: The kind of norm is not supported.
    """
    if spec.kind == "rms":
        return RMSNorm(size, spec.eps, weight=spec.weight, offset=spec.offset, context=context, prefix=prefix)
    if spec.kind == "layer":
        return LayerNorm(
            size,
            spec.eps,
            bias=spec.bias,
            weight=spec.weight,
            offset=spec.offset,
            context=context,
            prefix=prefix,
        )
    raise FeatureDisabled(f"norm {spec.kind}", "this worker knows rms and layer")


def _empty_weight(size: int, *, offset: float, context: ModelContext) -> nn.Parameter:
    """Allocate a weight in the model's precision; with an offset in float32, which keeps all bits of the sum."""
    return empty_parameter(size, context=context, dtype=torch.float32 if offset else None)


def _offset_target(weight: nn.Parameter, offset: float) -> WeightTarget:
    """Return the place of a weight that is kept as the stored one plus the offset."""
    shape = tuple(weight.shape)
    if not offset:
        return parameter_target(weight, shape)
    return WeightTarget(lambda stored: weight.copy_(stored.float() + offset), shape, shape[0])
