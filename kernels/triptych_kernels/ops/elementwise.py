"""Contracts of normalisation, gated activation and looking up rows."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl
from triptych_kernels.weights.base import LinearWeight

__all__ = [
    "clear_other_rows",
    "embedding",
    "gather_rows",
    "layer_norm",
    "local_ids",
    "rms_norm",
    "silu_and_mul",
]


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last axis in float32, and round once.

    Args:
        x: [num_rows, ..., hidden_size], float32 or of 16 bits. Rows are dense. Without a residual there may be gaps
            between them, as between the heads of a packed projection.
        weight: [hidden_size], float32 or of 16 bits; None means ones.
        residual: Shaped like x, contiguous, always float32, since rounding would hurt the sum over all layers most.
            If it is given, `x + residual` is normalised instead of x.
        out_dtype: float32 or of 16 bits; None means the weight's dtype, or that of x without a weight. There is one
            dtype of 16 bits at most among those of x, weight and result.
    Returns:
        The normalised tensor, in `out_dtype`. With a residual, also `x + residual` in float32, the next residual. Both
        are new and contiguous.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: RMSNorm, arXiv:1910.07467.
    """
    out_dtype = out_dtype or (x if weight is None else weight).dtype
    dtype = _check_norm("rms_norm", x, weight, residual, out_dtype)
    out: Tensor | tuple[Tensor, Tensor] = find_impl("rms_norm", x, impl, dtype=dtype)(
        x, weight, eps, residual, out_dtype
    )
    return out


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last axis in float32, and round once.

    The variance is the mean of the squared distances from the mean.

    Args:
        x: As `rms_norm` takes it, and so are weight, residual and out_dtype.
        bias: [hidden_size], of the weight's dtype; None means zeros, and so without a weight.
    Returns:
        As `rms_norm`.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: Layer Normalization, arXiv:1607.06450.
    """
    out_dtype = out_dtype or (x if weight is None else weight).dtype
    dtype = _check_norm("layer_norm", x, weight, residual, out_dtype)
    if bias is not None and (weight is None or bias.shape != weight.shape or bias.dtype != weight.dtype):
        beside = "no weight" if weight is None else f"weight {list(weight.shape)} {weight.dtype}"
        raise ValueError(
            f"layer_norm: bias {list(bias.shape)} {bias.dtype} does not fit {beside}; it must be like the weight"
        )
    out: Tensor | tuple[Tensor, Tensor] = find_impl("layer_norm", x, impl, dtype=dtype)(
        x, weight, bias, eps, residual, out_dtype
    )
    return out


def _check_norm(
    op: str, x: Tensor, weight: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype
) -> torch.dtype:
    """Check the operands of a normalisation, and return the narrowest dtype among them.

    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight {list(weight.shape)} does not fit x {list(x.shape)}; it must be [hidden_size]"
        )
    if x.ndim < 2 or not (x.is_contiguous() or (residual is None and x[:1].is_contiguous())):
        raise ValueError(
            f"{op}: x {list(x.shape)} with strides {list(x.stride())} must be [num_rows, ..., hidden_size], "
            "each row dense; with a residual, all contiguous"
        )
    weight_dtype = torch.float32 if weight is None else weight.dtype
    narrow = {x.dtype, weight_dtype, out_dtype} - {torch.float32}
    if len(narrow) > 1:
        raise ValueError(
            f"{op}: x is {x.dtype}, weight {weight_dtype}, the result {out_dtype}; "
            "those that are not torch.float32 must be of one dtype"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != torch.float32):
        raise ValueError(
            f"{op}: residual {list(residual.shape)} {residual.dtype} does not fit x "
            f"{list(x.shape)}; it must have that shape, in torch.float32"
        )
    return narrow.pop() if narrow else torch.float32


def silu_and_mul(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Compute `silu(gate) * up` of a packed [gate | up] projection.

    Args:
        x: [..., 2 * intermediate_size]; gate is the first half of the last axis.
    Returns:
        [..., intermediate_size], a new tensor. In a half precision silu may be rounded before the product.
    Raises:
        ValueError: The last axis is odd.
    Source: SwiGLU, arXiv:2002.05202.
    """
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: x {list(x.shape)} must be [..., 2 * intermediate_size]")
    out: Tensor = find_impl("silu_and_mul", x, impl)(x)
    return out


def embedding(
    token_ids: Tensor,
    weight: Tensor | LinearWeight,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Look up the weight's rows of these tokens.

    Args:
        token_ids: [num_tokens] int64, each below vocab_size. Not checked, since that would wait for the device.
        weight: [vocab_size, hidden_size]. It is a `LinearWeight` where the product of the logits shares it.
        out_dtype: float32 or the dtype of the weight; None means the latter.
    Returns:
        [num_tokens, hidden_size], a new tensor.
    Raises:
        ValueError: token_ids have another shape.
    """
    if token_ids.ndim != 1:
        raise ValueError(f"embedding: token_ids {list(token_ids.shape)} must be [num_tokens]")
    out: Tensor = find_impl("embedding", weight, impl)(token_ids, weight, out_dtype or weight.dtype)
    return out


def gather_rows(x: Tensor, rows: Tensor, *, impl: str | None = None) -> Tensor:
    """Compute `x[rows]`.

    Args:
        x: [num_rows, size], contiguous.
        rows: [num_gathered] int64, each below num_rows. Not checked, since that would wait for the device.
    Returns:
        [num_gathered, size], a new tensor like x.
    Raises:
        ValueError: Shapes disagree; names both.
    """
    if x.ndim != 2 or rows.ndim != 1:
        raise ValueError(
            f"gather_rows: x {list(x.shape)} must be [num_rows, size] and rows {list(rows.shape)} one list"
        )
    out: Tensor = find_impl("gather_rows", x, impl)(x, rows)
    return out


def local_ids(token_ids: Tensor, first: int, count: int, *, impl: str | None = None) -> Tensor:
    """Number ids from `first` on anew from 0, for a rank that holds `count` of them; all other ids become 0.

    Args:
        token_ids: [num_tokens] int64.
    Returns:
        [num_tokens] int64, a new tensor.
    Raises:
        ValueError: token_ids have another shape or type.
    """
    if token_ids.ndim != 1 or token_ids.dtype != torch.int64:
        raise ValueError(
            f"local_ids: token_ids {list(token_ids.shape)} {token_ids.dtype} must be [num_tokens] in torch.int64"
        )
    out: Tensor = find_impl("local_ids", token_ids, impl)(token_ids, first, count)
    return out


def clear_other_rows(
    x: Tensor, token_ids: Tensor, first: int, count: int, *, impl: str | None = None
) -> Tensor:
    """Set the rows of x to zero that have no id among the `count` from `first` on, in place, and return x.

    Args:
        x: [num_tokens, size], contiguous.
        token_ids: [num_tokens] int64.
    Raises:
        ValueError: Shapes or types disagree; names both.
    """
    if x.ndim != 2 or token_ids.shape != x.shape[:1] or token_ids.dtype != torch.int64:
        raise ValueError(
            f"clear_other_rows: token_ids {list(token_ids.shape)} {token_ids.dtype} do not fit x {list(x.shape)}; "
            "they must be [num_tokens] in torch.int64"
        )
    out: Tensor = find_impl("clear_other_rows", x, impl)(x, token_ids, first, count)
    return out
