"""A mixture of experts, token by token and expert by expert in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalize: bool
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, logits in enumerate(router_logits.tolist()):
        chosen = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))[:top_k]
        scores = router_logits[token].double().exp()
        total = scores[chosen].sum() if renormalize else scores.sum()
        for expert in chosen:
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            activated = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
            out[token] += scores[expert] / total * (w2[expert].double() @ activated.double())
    return out.to(x.dtype)
