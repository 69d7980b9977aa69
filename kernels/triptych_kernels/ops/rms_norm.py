"""Root-mean-square normalisation, with the residual addition that precedes it."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: None = None, *, impl: str | None = None
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, impl: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in float32 and rounded once.

    Args:
        x: [num_rows, ..., hidden_size], float32 or of the weight's dtype. Rows are dense; without a residual they
            may stand apart, as the heads of a packed projection do.
        weight: [hidden_size].
        residual: shaped like x, contiguous, float32 whatever x is: the sum over all layers is what rounding
            would hurt most. Given, `x + residual` is normalised instead of x.
    Returns:
        The normalised tensor, in the weight's dtype; with a residual, also `x + residual` in float32, the next
        residual. Both are new and contiguous.
    Raises:
        ValueError: shapes, dtypes or strides disagree; names both.
    Source: RMSNorm, arXiv:1910.07467.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {list(weight.shape)} does not fit x {list(x.shape)}; it must be [hidden_size]"
        )
    if x.ndim < 2 or not (x.is_contiguous() or (residual is None and x[:1].is_contiguous())):
        raise ValueError(
            f"rms_norm: x {list(x.shape)} with strides {list(x.stride())} must be [num_rows, ..., hidden_size], "
            "each row dense; with a residual, all contiguous"
        )
    if x.dtype not in (weight.dtype, torch.float32):
        raise ValueError(f"rms_norm: x is {x.dtype}, weight {weight.dtype}; x must be that or torch.float32")
    if residual is not None and (residual.shape != x.shape or residual.dtype != torch.float32):
        raise ValueError(
            f"rms_norm: residual {list(residual.shape)} {residual.dtype} does not fit x "
            f"{list(x.shape)}; it must have that shape, in torch.float32"
        )
    out: Tensor | tuple[Tensor, Tensor] = find_impl("rms_norm", weight, impl)(x, weight, eps, residual)
    return out
