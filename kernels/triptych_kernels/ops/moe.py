"""Contract of a mixture of experts: each token goes through the gated MLPs of the experts that its router prefers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl
from triptych_kernels.weights.base import LinearWeight

__all__ = ["fused_moe"]

ExpertWeights = Tensor | Sequence[LinearWeight]
"""Weights of one product of all experts: one stacked tensor, or a `LinearWeight` for each expert. On CUDA devices the
latter are an `ExpertStack`."""


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    top_k: int,
    renormalize: bool = True,
    impl: str | None = None,
) -> Tensor:
    """Compute a mixture of experts: each token goes through the gated MLPs of the experts that its router prefers.

        out = sum over the token's experts e of p_e * w2[e] @ (silu(gate) * up),    [gate | up] = w13[e] @ x

    The experts are those of the top_k largest logits, of equal ones those with the lowest number. p is the softmax
    over all logits, or with `renormalize` over those of the chosen experts. Sums are taken in float32. silu(gate) * up
    is rounded to x's dtype, and the result once (plain torch rounds every product). A token's values, NaN included,
    affect no other token's result. Each `LinearWeight` may round the inputs of both products too, as in `ops.linear`.

    Args:
        x: [num_tokens, hidden_size], the last axis contiguous.
        router_logits: [num_tokens, num_experts], the last axis contiguous, float32 or of x's dtype.
        w13: [num_experts, 2 * intermediate_size, hidden_size], gate first, contiguous, of x's dtype; or a gated
            `LinearWeight` of the last two axes for each expert.
        w2: [num_experts, hidden_size, intermediate_size] like w13, not gated.
        top_k: Number of experts of a token, from 1 to num_experts.
        renormalize: Whether the probabilities of a token's experts sum to 1.
    Returns:
        [num_tokens, hidden_size], a new tensor like x.
    Raises:
        ValueError: Shapes or dtypes disagree, or top_k is out of range; names both.
    Source: Mixtral of Experts, arXiv:2401.04088.
    """
    _check(x, router_logits, w13, w2, top_k)
    operand = w13 if isinstance(w13, Tensor) else w13[0]
    out: Tensor = find_impl("fused_moe", operand, impl)(x, router_logits, w13, w2, top_k, renormalize)
    return out


def _check(x: Tensor, router_logits: Tensor, w13: ExpertWeights, w2: ExpertWeights, top_k: int) -> None:
    shapes = []
    for name, weight in (("w13", w13), ("w2", w2)):
        if isinstance(weight, Tensor):
            fits = weight.dtype == x.dtype and weight.is_contiguous()
            shape = tuple(weight.shape)
        else:
            fits = all(x.dtype in one.input_dtypes and one.shape == weight[0].shape for one in weight)
            shape = (len(weight), *weight[0].shape) if weight else (0,)
        if not fits or len(shape) != 3:
            raise ValueError(
                f"fused_moe: {name} {list(shape)} must be [num_experts, out_features, in_features], contiguous or "
                f"LinearWeights of one shape, for inputs in {x.dtype}"
            )
        shapes.append(shape)
    num_experts, hidden_size, intermediate_size = shapes[1]
    if shapes[0] != (num_experts, 2 * intermediate_size, hidden_size):
        raise ValueError(
            f"fused_moe: w13 {list(shapes[0])} and w2 {list(shapes[1])} must be "
            "[num_experts, 2 * intermediate_size, hidden_size] and [num_experts, hidden_size, intermediate_size]"
        )
    if x.ndim != 2 or x.shape[1] != hidden_size or x.stride(1) != 1:
        raise ValueError(
            f"fused_moe: x {list(x.shape)} does not fit w2 {list(shapes[1])}; it must be "
            "[num_tokens, hidden_size], its last axis contiguous"
        )
    if (
        router_logits.shape != (len(x), num_experts)
        or router_logits.stride(1) != 1
        or router_logits.dtype not in (x.dtype, torch.float32)
    ):
        raise ValueError(
            f"fused_moe: router_logits {list(router_logits.shape)} {router_logits.dtype} must be "
            f"[num_tokens, num_experts] = {[len(x), num_experts]} in {x.dtype} or torch.float32, the last axis "
            "contiguous"
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"fused_moe: top_k {top_k} must be from 1 to the number of experts, {num_experts}")
