"""The gated activation of a Llama MLP."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.registry import find_impl


def silu_and_mul(x: Tensor, *, impl: str | None = None) -> Tensor:
    """`silu(gate) * up` of a packed [gate | up] projection.

    Args:
        x: [..., 2 * intermediate_size]; gate is the first half of the last axis.
    Returns:
        [..., intermediate_size], a new tensor; in a half precision silu may be rounded before the product.
    Raises:
        ValueError: the last axis is odd.
    Source: SwiGLU, arXiv:2002.05202.
    """
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: x {list(x.shape)} must be [..., 2 * intermediate_size]")
    out: Tensor = find_impl("silu_and_mul", x, impl)(x)
    return out
