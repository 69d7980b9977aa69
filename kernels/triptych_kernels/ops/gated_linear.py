"""The first half of a gated MLP: two products and an activation."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.ops.linear import check_linear
from triptych_kernels.registry import find_impl
from triptych_kernels.weights.base import HeldWeight

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def gated_linear(
    x: Tensor,
    weight: Tensor | HeldWeight,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    impl: str | None = None,
) -> Tensor:
    """`activation(gate) * up` of the packed projection [gate | up]: `linear`, then `silu_and_mul` or its like.

    Args:
        x: [num_rows, in_features], as `linear` takes it.
        weight: [2 * intermediate_size, in_features], gate first.
        bias: [2 * intermediate_size]; None with a held weight, which has its own.
        activation: one of `ACTIVATIONS`, under Hugging Face's names.
    Returns:
        [num_rows, intermediate_size], a new tensor like x; of a held weight rounded once, at the end.
    Raises:
        ValueError: shapes or dtypes disagree, or the activation is unknown; names it.
    Source: SwiGLU and GEGLU, arXiv:2002.05202.
    """
    check_linear("gated_linear", x, weight, bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_linear: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    out: Tensor = find_impl("gated_linear", weight, impl)(x, weight, bias, activation)
    return out
