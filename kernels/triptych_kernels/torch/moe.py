"""A mixture of experts in plain torch: one expert after the other, with the tokens that chose it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.expert_choice import SMALLEST_SUM, ExpertChoice
from triptych_kernels.torch.elementwise import activate, activate_gated


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    choice: ExpertChoice,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    first_expert: int,
) -> Tensor:
    weights, experts = choose_experts(router_logits, choice)
    experts = experts - first_expert  # among those that are here
    act = activate_gated if w13.shape[1] > w2.shape[2] else activate
    results = torch.zeros(choice.top_k, *x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if not 0 <= expert < len(w13):
            continue
        tokens, ranks = (experts == expert).nonzero(as_tuple=True)
        inputs = x[tokens]
        if choice.scales_input:
            inputs = (inputs * weights[tokens, ranks, None]).to(x.dtype)
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in (w13_bias, w2_bias))
        activated = act(functional.linear(inputs, w13[expert], up_bias), activation)
        results[ranks, tokens] = functional.linear(activated, w2[expert], down_bias).float()
    factors = torch.ones_like(weights) if choice.scales_input else weights
    mixed = results[0] * factors[:, :1]
    for rank in range(
        1, choice.top_k
    ):  # one after the other, so that a token's sum does not depend on its batch
        mixed.addcmul_(results[rank], factors[:, rank : rank + 1])
    return add_shared(mixed, shared, shared_gate).to(x.dtype)


def add_shared(mixed: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    """Return the sum of the experts and the shared one, in float32.

    Args:
        mixed: [num_tokens, hidden_size].
        shared, shared_gate: As of `ops.fused_moe`.
    """
    if shared is None:
        return mixed
    gated = shared.float() if shared_gate is None else shared_gate.sigmoid()[:, None] * shared.float()
    return mixed + gated


def choose_experts(router_logits: Tensor, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """Return each token's experts: their weights in float32, and the indices of what they multiply by.

    Both are [num_tokens, top_k], the expert with the largest key first.
    """
    logits = router_logits.float()
    if choice.score in ("softmax", "sparsemixer"):
        scores = logits.softmax(dim=-1)
    elif choice.score == "sigmoid":
        scores = logits.sigmoid()
    elif choice.score == "given":
        scores = logits
    else:
        scores = functional.softplus(logits).sqrt()
    keys = logits if choice.compares_logits else scores
    if choice.score == "given":
        keys = logits.abs()
    if choice.correction is not None:
        keys = scores + choice.correction
    if choice.top_groups < choice.num_groups:
        keys = keys.masked_fill(~_eligible(keys, choice), -torch.inf)
    # stable: of equal keys the lowest expert first, which torch.topk leaves open
    experts = keys.sort(dim=-1, descending=True, stable=True).indices[:, : choice.top_k]
    if choice.score == "sparsemixer":
        weights = _sparsemixer(logits, experts, choice.jitter)
    elif choice.renormalize and choice.score == "softmax":
        weights = logits.gather(1, experts).softmax(dim=-1)
    else:
        weights = scores.gather(1, experts)
        if choice.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    if choice.expert_scales is not None:
        weights = weights * choice.expert_scales[experts]
    return weights * choice.scale, experts if choice.weight_index is None else choice.weight_index[experts]


def _sparsemixer(logits: Tensor, experts: Tensor, jitter: float) -> Tensor:
    """Return the weights of experts, each among those that are not chosen yet and near it."""
    weights, left = [], logits
    for rank in range(experts.shape[1]):
        chosen = experts[:, rank : rank + 1]
        best = logits.gather(1, chosen)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def _eligible(keys: Tensor, choice: ExpertChoice) -> Tensor:
    """Return whether an expert is in one of the groups that its token chooses from, [num_tokens, num_experts]."""
    groups = keys.view(len(keys), choice.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values[..., : choice.group_experts].sum(dim=-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : choice.top_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return is_chosen[..., None].expand_as(groups).reshape(keys.shape)
