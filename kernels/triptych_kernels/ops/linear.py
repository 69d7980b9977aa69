"""Contracts of products with the weight of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl
from triptych_kernels.weights.base import LinearWeight

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "gated_linear", "linear"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
"""Functions of one number, under Hugging Face's names.

    silu                 x * sigmoid(x)
    gelu                 x * (1 + erf(x / sqrt(2))) / 2
    gelu_pytorch_tanh    x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2
    relu                 max(x, 0)
    relu2                max(x, 0)^2
    quick_gelu           x * sigmoid(1.702 * x)
"""

GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai")
"""Those of `ACTIVATIONS`, as `activation(gate) * up`, and one that also changes `up`.

    swiglu_oai           quick_gelu(min(gate, 7)) * (clamp(up, -7, 7) + 1), as in GPT-OSS
"""


def linear(
    x: Tensor,
    weight: Tensor | LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Compute `x @ weight.T + bias`, summed in float32, and apply the activation to it.

    A packed or quantized weight sums every output over its inputs in one fixed order for any number of rows, unless it
    was created without batch invariance.

    Args:
        x: [num_rows, in_features], the last axis contiguous. Its dtype is the weight's, or one of a `LinearWeight`'s
            `input_dtypes`.
        weight: [out_features, in_features].
        bias: [out_features], of the weight's dtype. None with a `LinearWeight`, which has its own.
        activation: One of `ACTIVATIONS`; None means none.
        out_dtype: float32 or the dtype of x; None means the latter.
    Returns:
        [num_rows, out_features], a new tensor. A `LinearWeight` rounds once, after the activation.
    Raises:
        ValueError: Shapes or dtypes disagree, or the activation is unknown; names both.
    """
    _check_linear("linear", x, weight, bias, gated=False)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"linear: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    out: Tensor = find_impl("linear", weight, impl)(x, weight, bias, out_dtype or x.dtype, activation)
    return out


def _check_linear(
    op: str, x: Tensor, weight: Tensor | LinearWeight, bias: Tensor | None, *, gated: bool
) -> None:
    """Check that these can be multiplied.

    Raises:
        ValueError: They cannot; names both.
    """
    shape = tuple(weight.shape)
    dtypes = weight.input_dtypes if isinstance(weight, LinearWeight) else (weight.dtype,)
    if x.ndim != 2 or x.shape[1] != shape[1] or x.stride(1) != 1 or x.dtype not in dtypes:
        raise ValueError(
            f"{op}: x {list(x.shape)} {x.dtype} does not fit the weight {list(shape)} for "
            f"{' or '.join(map(str, dtypes))}; it must be [num_rows, in_features] of that dtype, its last axis "
            "contiguous"
        )
    if bias is not None and (isinstance(weight, LinearWeight) or bias.shape != shape[:1]):
        raise ValueError(
            f"{op}: bias {list(bias.shape)} does not fit the weight {list(shape)}; "
            "it must be [out_features], and None with a LinearWeight, which has its own"
        )
    if isinstance(weight, LinearWeight) and weight.gated != gated:
        raise ValueError(
            f"{op}: the weight {list(shape)} was created with gated={weight.gated}; it must be {gated}"
        )


def gated_linear(
    x: Tensor,
    weight: Tensor | LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    impl: str | None = None,
) -> Tensor:
    """Compute the packed projection [gate | up] as `linear` does, then `activation(gate) * up`.

    Args:
        x: [num_rows, in_features], as `linear` takes it.
        weight: [2 * intermediate_size, in_features], gate first.
        bias: [2 * intermediate_size]. None with a `LinearWeight`, which has its own.
        activation: One of `GATED_ACTIVATIONS`.
    Returns:
        [num_rows, intermediate_size], a new tensor like x. A `LinearWeight` rounds once, at the end.
    Raises:
        ValueError: Shapes or dtypes disagree, or the activation is unknown; names it.
    Source: SwiGLU and GEGLU, arXiv:2002.05202.
    """
    _check_linear("gated_linear", x, weight, bias, gated=True)
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"gated_linear: activation {activation!r} is none of {', '.join(GATED_ACTIVATIONS)}")
    out: Tensor = find_impl("gated_linear", weight, impl)(x, weight, bias, activation)
    return out
