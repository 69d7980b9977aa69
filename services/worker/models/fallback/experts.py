"""The experts function that models of transformers call, for mixtures that keep their experts' weights stacked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import GATED_ACTIVATIONS, fused_moe
from triptych_kernels.torch.elementwise import activate_gated
from triptych_kernels.weights.base import Half, LinearWeight
from triptych_kernels.weights.packed import can_pack
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.moe import create_packed, layer_of
from triptych_services.worker.layers.weights import WeightedLayer, WeightTarget
from triptych_services.worker.models.fallback import IMPLEMENTATION
from triptych_services.worker.models.fallback.layers import GROUP_SIZE, unquantized

_HALVES: tuple[Half, Half] = ("gate", "up")
_PROBED = 64.0  # activations are compared up to this; the limit of GPT-OSS is 7


class PackedMixture(WeightedLayer):
    """The weights of a mixture of transformers in the form that native products read: packed or quantized."""

    def __init__(self, like: Any, activation: str, *, context: ModelContext, prefix: str) -> None:
        """
        Args:
            like: The mixture, with weights that need not have memory.
            activation: One of `GATED_ACTIVATIONS`.
            prefix: Name of the mixture in the model.
        """
        super().__init__()
        self.prefix, self.activation = prefix, activation
        self.layer = layer_of(prefix, context)
        self.is_transposed, self.is_concatenated = like.is_transposed, like.is_concatenated
        self.has_bias = like.has_bias
        num_experts, in_features, out_features = _sizes(like)
        inner = out_features // 2

        def create(out_features: int, in_features: int, name: str, *, gated: bool) -> Sequence[LinearWeight]:
            sources = [[f"{prefix}.{name}"]] * num_experts
            return create_packed(
                out_features, in_features, sources, gated=gated, bias=self.has_bias, context=context
            )

        self.w13 = create(out_features, in_features, "gate_up_proj", gated=True)
        self.w2 = create(in_features, inner, "down_proj", gated=False)
        self.holders = nn.ModuleList(_Holder(*pair) for pair in zip(self.w13, self.w2, strict=True))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the mixture; arguments as of `_run_experts`."""
        num_experts = len(self.w13)
        # numbers above the last are experts that compute nothing
        index = top_k_index.clamp(max=num_experts)
        weights = torch.zeros(len(hidden), num_experts + 1, dtype=torch.float32, device=hidden.device)
        weights = weights.scatter_add(1, index, top_k_weights.float())
        top_k = min(index.shape[1], num_experts)
        choice = ExpertChoice(top_k, "given", renormalize=False, layer=self.layer)
        rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        return fused_moe(
            rows, weights[:, :num_experts], self.w13, self.w2, choice, activation=self.activation
        )

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {}
        for name, weights, is_gated in (("gate_up_proj", self.w13, True), ("down_proj", self.w2, False)):
            out_features, in_features = weights[0].shape
            shape = (in_features, out_features) if self.is_transposed else (out_features, in_features)
            fill = partial(self._fill, weights, is_gated)
            targets[f"{self.prefix}.{name}"] = WeightTarget(fill, (len(weights), *shape), len(weights))
            if self.has_bias:
                bias = WeightTarget(fill, (len(weights), out_features), len(weights))
                targets[f"{self.prefix}.{name}_bias"] = bias
        return targets

    def _fill(self, weights: Sequence[LinearWeight], is_gated: bool, stored: Tensor) -> None:
        """Store the weights, or the biases, of all experts."""
        for weight, own in zip(weights, stored, strict=True):
            fill = weight.fill_bias if own.dim() == 1 else weight.fill_rows
            rows = own.t() if self.is_transposed and own.dim() == 2 else own
            if not is_gated:
                fill(0, rows.contiguous())
                continue
            halves = rows.chunk(2) if self.is_concatenated else (rows[::2], rows[1::2])
            for half, part in zip(_HALVES, halves, strict=True):
                fill(0, part.contiguous(), half=half)


class _Holder(nn.Module):
    """The weights of one expert, where `linear_weights` finds them."""

    def __init__(self, w13: LinearWeight, w2: LinearWeight) -> None:
        super().__init__()
        self.w13, self.w2 = w13, w2


def pack_experts(model: nn.Module, context: ModelContext, kept: re.Pattern[str]) -> None:
    """Give the model's mixtures weights for native products in place of their parameters, where there are any.

    Args:
        model: On the meta device.
        kept: As of `kept_in_float32`.
    """
    for name, module in list(model.named_modules()):
        if not is_stacked(module) or kept.search(f"{name}.gate_up_proj"):
            continue
        activation = _find_activation(module)
        if activation is None or not _can_pack(module, context):
            continue
        _, in_features, out_features = _sizes(module)
        is_cut = in_features % GROUP_SIZE or out_features // 2 % GROUP_SIZE
        own = unquantized(context) if is_cut else context
        mixture = PackedMixture(module, activation, context=own, prefix=name)
        module._parameters.clear()
        module.packed = mixture


def _sizes(module: Any) -> tuple[int, int, int]:
    """Return the numbers of experts, of an expert's inputs, and of its gates and ups."""
    num_experts, rows, columns = module.gate_up_proj.shape
    return (num_experts, rows, columns) if module.is_transposed else (num_experts, columns, rows)


def _can_pack(module: Any, context: ModelContext) -> bool:
    _, in_features, out_features = _sizes(module)
    is_native = all(can_pack(size, context.dtype) for size in (in_features, out_features // 2))
    return context.device.type == "cpu" and is_native and module.gate_up_proj.dtype == context.dtype


def _find_activation(module: Any) -> str | None:
    """Return the one of `GATED_ACTIVATIONS` that a mixture computes, by what comes out; None if it is none."""
    expected = {"gate_up_proj", "down_proj"}
    if module.has_bias:
        expected |= {f"{name}_bias" for name in expected}
    others = {name for name, _ in module.named_parameters()} ^ expected
    if not module.has_gate or module.has_post_expert_norm or others:
        return None
    gate, up = torch.linspace(-_PROBED, _PROBED, 1025), torch.linspace(_PROBED, -_PROBED / 3, 1025).sin() * 9
    order = (gate, up) if module.is_concatenated else torch.stack((gate, up), dim=1).view(2, -1)
    found = module._apply_gate(torch.cat(tuple(order))[None])
    for activation in GATED_ACTIVATIONS:
        own = activate_gated(torch.cat((gate, up))[None], activation)
        if found.shape == own.shape and torch.allclose(found, own, rtol=1e-5, atol=1e-5):
            return activation
    return None


def _run_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a mixture: in one native call if its weights are packed, else expert by expert.

    Args:
        hidden: [num_tokens, hidden_size]
        top_k_index: [num_tokens, k], the experts that a token goes through.
        top_k_weights: [num_tokens, k]

    Returns:
        [num_tokens, hidden_size]
    """
    packed = getattr(module, "packed", None)
    if packed is not None:
        result: Tensor = packed(hidden, top_k_index, top_k_weights)
        return result
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
