"""The experts function that models of transformers call, for mixtures that keep their experts' weights stacked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from triptych_services.worker.models.fallback import IMPLEMENTATION


def _run_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a mixture expert by expert.

    Args:
        hidden: [num_tokens, hidden_size]
        top_k_index: [num_tokens, k], the experts that a token goes through.
        top_k_weights: [num_tokens, k]

    Returns:
        [num_tokens, hidden_size]
    """
    out = torch.zeros_like(hidden)
    up_weight = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias, down_bias = None, None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    for expert in top_k_index.unique().tolist():
        if expert >= len(up_weight):
            continue  # an expert that computes nothing
        tokens, places = torch.where(top_k_index == expert)
        x = _product(hidden[tokens], up_weight[expert], up_bias, expert, is_transposed=module.is_transposed)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = _product(x, module.down_proj[expert], down_bias, expert, is_transposed=module.is_transposed)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        out.index_add_(0, tokens, (x * top_k_weights[tokens, places, None]).to(out.dtype))
    return out


def _product(x: Tensor, weight: Tensor, biases: Tensor | None, expert: int, *, is_transposed: bool) -> Tensor:
    out = functional.linear(x, weight.t() if is_transposed else weight)
    return out if biases is None else out + biases[expert]


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module is a mixture that calls this function."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


def register_experts() -> None:
    """Let configs of transformers name this function."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run_experts)
