"""A mixture of experts, token by token and expert by expert in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.reference.linear import gated_linear, linear


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, logits in enumerate(router_logits.tolist()):
        chosen = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))[:top_k]
        scores = router_logits[token].double().exp()
        total = scores[chosen].sum() if renormalize else scores.sum()
        for expert in chosen:
            up_bias, down_bias = (None if bias is None else bias[expert] for bias in (w13_bias, w2_bias))
            activated = gated_linear(x[token], w13[expert], up_bias, activation)
            out[token] += (
                scores[expert] / total * linear(activated, w2[expert], down_bias, torch.float64, None)
            )
    return out.to(x.dtype)
