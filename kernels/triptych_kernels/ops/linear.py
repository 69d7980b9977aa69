"""Products with the weight of a linear layer, plain or packed."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.packed_weight import PackedWeight
from triptych_kernels.dispatch import find_impl


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32.

    A packed weight sums every output over its inputs in one fixed order, whatever the number of rows.

    Args:
        x: [num_rows, in_features], the last axis contiguous, of the weight's dtype; float32 or bfloat16 with a
            quantized one.
        weight: [out_features, in_features].
        bias: [out_features], of the weight's dtype; None with a packed weight, which holds its own.
        out_dtype: float32 or that of x; None: that of x.
    Returns:
        [num_rows, out_features], a new tensor.
    Raises:
        ValueError: shapes or dtypes disagree; names both.
    """
    check_linear("linear", x, weight, bias)
    out: Tensor = find_impl("linear", weight, impl)(x, weight, bias, out_dtype or x.dtype)
    return out


def check_linear(op: str, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> None:
    """Raise ValueError unless these can be multiplied."""
    shape = tuple(weight.shape)
    dtypes = weight.input_dtypes if isinstance(weight, PackedWeight) else (weight.dtype,)
    if x.ndim != 2 or x.shape[1] != shape[1] or x.stride(1) != 1 or x.dtype not in dtypes:
        raise ValueError(
            f"{op}: x {list(x.shape)} {x.dtype} does not fit the weight {list(shape)} for "
            f"{' or '.join(map(str, dtypes))}; it must be [num_rows, in_features] of that dtype, its last axis "
            "contiguous"
        )
    if bias is not None and (isinstance(weight, PackedWeight) or bias.shape != shape[:1]):
        raise ValueError(
            f"{op}: bias {list(bias.shape)} does not fit the weight {list(shape)}; "
            "it must be [out_features], and a packed weight holds its own"
        )
