"""A mixture of experts, token by token and expert by expert in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.expert_choice import SMALLEST_SUM, ExpertChoice
from triptych_kernels.reference.linear import gated_linear, linear


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    choice: ExpertChoice,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, logits in enumerate(router_logits.tolist()):
        for chosen, weight in choose_experts(logits, choice):
            index = chosen if choice.weight_index is None else int(choice.weight_index[chosen])
            expert = index - first_expert
            if not 0 <= expert < len(w13):
                continue
            up_bias, down_bias = (None if bias is None else bias[expert] for bias in (w13_bias, w2_bias))
            inputs = (x[token] * weight).to(x.dtype) if choice.scales_input else x[token]
            if w13.shape[1] > w2.shape[2]:
                activated = gated_linear(inputs, w13[expert], up_bias, activation)
            else:
                activated = linear(inputs, w13[expert], up_bias, x.dtype, activation)
            result = linear(activated, w2[expert], down_bias, torch.float64, None)
            out[token] += result if choice.scales_input else weight * result
    if shared is not None:
        gate = 1.0 if shared_gate is None else 1 / (1 + torch.exp(-shared_gate.double()[:, None]))
        out += gate * shared.double()
    return out.to(x.dtype)


def choose_experts(logits: list[float], choice: ExpertChoice) -> list[tuple[int, float]]:
    """Return the experts of one token with their weights, the one with the largest key first."""
    chosen = _choose(logits, choice)
    if choice.expert_scales is None:
        return chosen
    return [(expert, weight * choice.expert_scales[expert].item()) for expert, weight in chosen]


def _choose(logits: list[float], choice: ExpertChoice) -> list[tuple[int, float]]:
    """Return the experts of one token with their weights, without factors by expert."""
    scores = _scores(logits, choice.score)
    if choice.score == "given":
        chosen = sorted(range(len(logits)), key=lambda expert: (-abs(logits[expert]), expert))
        return [(expert, choice.scale * logits[expert]) for expert in chosen[: choice.top_k]]
    corrections = [0.0] * len(logits) if choice.correction is None else choice.correction.tolist()
    keys = [score + correction for score, correction in zip(scores, corrections, strict=True)]
    size = len(logits) // choice.num_groups
    groups = [range(first, first + size) for first in range(0, len(logits), size)]

    def count_of(group: range) -> float:
        return sum(sorted((keys[expert] for expert in group), reverse=True)[: choice.group_experts])

    best = sorted(groups, key=lambda group: (-count_of(group), group.start))[: choice.top_groups]
    eligible = [expert for group in best for expert in group]
    chosen = sorted(eligible, key=lambda expert: (-keys[expert], expert))[: choice.top_k]
    if choice.score == "sparsemixer":
        return [
            (expert, choice.scale * _share_of_near(logits, chosen[:rank], expert, choice.jitter))
            for rank, expert in enumerate(chosen)
        ]
    total = 1.0
    if choice.renormalize:
        total = sum(scores[expert] for expert in chosen)
        total += 0.0 if choice.score == "softmax" else SMALLEST_SUM
    return [(expert, choice.scale * scores[expert] / total) for expert in chosen]


def _share_of_near(logits: list[float], taken: list[int], chosen: int, jitter: float) -> float:
    best = logits[chosen]
    near = [
        logit
        for expert, logit in enumerate(logits)
        if expert not in taken and best - logit <= 2 * jitter * max(abs(logit), best)
    ]
    return math.exp(best) / sum(math.exp(logit) for logit in near)


def _scores(logits: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    if score == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]
