"""Rows of a weight, looked up by token."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl
from triptych_kernels.weights.base import HeldWeight


def embedding(
    token_ids: Tensor,
    weight: Tensor | HeldWeight,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """The weight's rows of these tokens.

    Args:
        token_ids: [num_tokens] int64, each below vocab_size; not checked, the device is not waited for.
        weight: [vocab_size, hidden_size]; plain, or in the form of the logits that share it.
        out_dtype: float32 or that of the weight; None: that of the weight.
    Returns:
        [num_tokens, hidden_size], a new tensor.
    Raises:
        ValueError: token_ids have another shape.
    """
    if token_ids.ndim != 1:
        raise ValueError(f"embedding: token_ids {list(token_ids.shape)} must be [num_tokens]")
    out: Tensor = find_impl("embedding", weight, impl)(token_ids, weight, out_dtype or weight.dtype)
    return out
