"""A mixture of experts in plain torch: one expert after the other, with the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.torch.elementwise import activate_gated


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:
    def apply_expert(expert: int, inputs: Tensor) -> Tensor:
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in (w13_bias, w2_bias))
        activated = activate_gated(functional.linear(inputs, w13[expert], up_bias), activation)
        return functional.linear(activated, w2[expert], down_bias)

    return mix_experts(x, router_logits, top_k, renormalize, apply_expert)


def mix_experts(
    x: Tensor,
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    apply_expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Compute `ops.fused_moe` with any way of computing an expert's MLP.

    Args:
        apply_expert: Takes an expert's number and the inputs [n, hidden_size] of its tokens, returns its results of
            the same shape.
    """
    probabilities, experts = choose_experts(router_logits, top_k, renormalize)
    results = torch.empty(top_k, *x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        tokens, ranks = (experts == expert).nonzero(as_tuple=True)
        results[ranks, tokens] = apply_expert(expert, x[tokens]).float()
    mixed = results[0] * probabilities[:, :1]
    for rank in range(1, top_k):  # one after the other, so that a token's sum does not depend on its batch
        mixed.addcmul_(results[rank], probabilities[:, rank : rank + 1])
    return mixed.to(x.dtype)


def choose_experts(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's experts: their probabilities in float32 and their numbers.

    Both are [num_tokens, top_k], the most probable expert first.
    """
    # stable: of equal logits the lowest expert first, which torch.topk leaves open
    logits, experts = router_logits.float().sort(dim=-1, descending=True, stable=True)
    if renormalize:
        return logits[:, :top_k].softmax(dim=-1), experts[:, :top_k]
    return logits.softmax(dim=-1)[:, :top_k], experts[:, :top_k]
