"""Contracts of products with the weight of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import DEVICE_TO_IMPL, find_impl, load_impl
from triptych_kernels.weights.adapters import AdapterRef, PanelTable
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.packed import HeadWeight

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "adapt_embedding", "gated_linear", "head_linear", "linear"]

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
    adapters: AdapterRef | None = None,
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
        adapters: What low-rank adapters of some rows add to the product, before the activation; None: nothing. Their
            table is made for this weight by `create_adapter_table`.
    Returns:
        [num_rows, out_features], a new tensor. A `LinearWeight` rounds once, after the activation.
    Raises:
        ValueError: Shapes or dtypes disagree, or the activation is unknown; names both.
    """
    _check_linear("linear", x, weight, bias, gated=False)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"linear: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    operands = (x, weight, bias, out_dtype or x.dtype, activation)
    out: Tensor
    if adapters is None:
        out = find_impl("linear", weight, impl)(*operands)
    else:
        _check_adapters("linear", x, adapters)
        out = find_impl("linear", weight, impl or _adapted_impl(weight, adapters))(*operands, adapters)
    return out


def _adapted_impl(weight: Tensor | LinearWeight, adapters: AdapterRef) -> str:
    """Return the package that computes with such a table and weight, or rows, on their device."""
    if isinstance(adapters.table, PanelTable):
        return "cpu"
    if isinstance(weight, LinearWeight):
        return weight.impl
    return "triton" if DEVICE_TO_IMPL[weight.device.type] == "triton" else "torch"


def _check_adapters(op: str, x: Tensor, adapters: AdapterRef) -> None:
    """Check that every row has a slot.

    Raises:
        ValueError: It has not; names both.
    """
    slots = adapters.slots
    fits = x.ndim == 1 if adapters.table.is_lookup else x.shape[1:] == (adapters.table.in_features,)
    if slots.shape != x.shape[:1] or slots.dtype != torch.int32 or not fits:
        raise ValueError(
            f"{op}: slots {list(slots.shape)} {slots.dtype} of adapters for {adapters.table.in_features} inputs do not "
            f"fit x {list(x.shape)}; they must be [num_rows] int32"
        )


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
    adapters: AdapterRef | None = None,
    impl: str | None = None,
) -> Tensor:
    """Compute the packed projection [gate | up] as `linear` does, then `activation(gate) * up`.

    Args:
        x: [num_rows, in_features], as `linear` takes it.
        weight: [2 * intermediate_size, in_features], gate first.
        bias: [2 * intermediate_size]. None with a `LinearWeight`, which has its own.
        activation: One of `GATED_ACTIVATIONS`.
        adapters: As of `linear`.
    Returns:
        [num_rows, intermediate_size], a new tensor like x. A `LinearWeight` rounds once, at the end.
    Raises:
        ValueError: Shapes or dtypes disagree, or the activation is unknown; names it.
    Source: SwiGLU and GEGLU, arXiv:2002.05202.
    """
    _check_linear("gated_linear", x, weight, bias, gated=True)
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"gated_linear: activation {activation!r} is none of {', '.join(GATED_ACTIVATIONS)}")
    out: Tensor
    if adapters is None:
        out = find_impl("gated_linear", weight, impl)(x, weight, bias, activation)
    else:
        _check_adapters("gated_linear", x, adapters)
        implementation = find_impl("gated_linear", weight, impl or _adapted_impl(weight, adapters))
        out = implementation(x, weight, bias, activation, adapters)
    return out


def head_linear(x: Tensor, weight: Tensor | HeadWeight, *, impl: str | None = None) -> Tensor:
    """Compute `x[:, head] @ weight[head].T` for each head, summed in float32 and rounded once.

    A `HeadWeight` sums every output over its inputs in one fixed order for any number of rows.

    Args:
        x: [num_rows, num_heads, in_features], may be a view of a larger tensor, the last axis dense; of the weight's
            dtype.
        weight: [num_heads, out_features, in_features].
    Returns:
        [num_rows, num_heads, out_features], a new tensor like x.
    Raises:
        ValueError: Shapes or dtypes disagree; names both.
    """
    shape = weight.head_shape if isinstance(weight, HeadWeight) else tuple(weight.shape)
    num_heads, _, in_features = shape
    if x.ndim != 3 or x.shape[1:] != (num_heads, in_features) or x.dtype != weight.dtype or x.stride(2) != 1:
        raise ValueError(
            f"head_linear: x {list(x.shape)} {x.dtype} with strides {x.stride()} does not fit a weight of {num_heads} "
            f"heads with {in_features} inputs of {weight.dtype}; it must be [num_rows, num_heads, in_features] of that "
            "dtype, the last axis dense"
        )
    own = "cpu" if isinstance(weight, HeadWeight) else "torch"
    out: Tensor = load_impl("head_linear", impl or own)(x, weight)
    return out


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRef, *, impl: str | None = None) -> Tensor:
    """Add to each row of x what the row's adapter adds to the embedding of its token, in place, and return x.

    Args:
        x: [num_tokens, hidden_size] float32, contiguous.
        token_ids: [num_tokens] int64, each below the table's number of inputs. Not checked.
        adapters: With a table that looks up.
    Raises:
        ValueError: Shapes or types disagree; names both.
    """
    _check_adapters("adapt_embedding", token_ids, adapters)
    if x.ndim != 2 or x.dtype != torch.float32 or len(x) != len(token_ids):
        raise ValueError(
            f"adapt_embedding: x {list(x.shape)} {x.dtype} must be [num_tokens, hidden_size] in float32"
        )
    implementation = find_impl("adapt_embedding", x, impl or _adapted_impl(x, adapters))
    out: Tensor = implementation(x, token_ids, adapters)
    return out
