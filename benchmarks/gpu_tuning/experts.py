"""Workloads of mixtures of experts, plain and quantized, at the rows per expert that a bucket ends with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_tuning.products import fill_channels, fill_groups
from benchmarks.gpu_tuning.workload import Workload
from triptych_kernels.ops import fused_moe
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.routing import Routing, route
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat

_DTYPE = torch.bfloat16
_MOST_ROWS = 1024
"""Of an expert, in the place of the last bucket's end: longer only takes longer."""


def plain_workloads(
    num_experts: int, hidden_size: int, intermediate_size: int, rows_per_expert: int, *, device: torch.device
) -> list[Workload]:
    """Of `fused_moe_gate_up` and `fused_moe_down`: both products. The weights of an expert alone fill a cache."""
    num_tokens, top_k = _num_tokens(num_experts, rows_per_expert)
    w13 = _normal(num_experts, 2 * intermediate_size, hidden_size, device=device).mul_(0.02)
    w2 = _normal(num_experts, hidden_size, intermediate_size, device=device).mul_(0.02)
    x, router = (_normal(num_tokens, size, device=device) for size in (hidden_size, num_experts))
    call = partial(fused_moe, x, router, w13, w2, top_k=top_k, impl="triton")
    return [Workload(f"{num_tokens} tokens", [call])]


def group_workloads(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    bits: int,
    is_affine: bool,
    rows_per_expert: int,
    *,
    device: torch.device,
    batch_invariant: bool,
) -> list[Workload]:
    """Of `quantized_experts`, and where rows need not be batch-invariant of `quantized_experts_by_weights`."""
    stack = GroupQuantizedExperts(
        num_experts,
        out_features,
        in_features,
        _DTYPE,
        QuantizedFormat(bits, is_affine=bool(is_affine)),
        device=device,
        gated=bool(is_gated),
        batch_invariant=batch_invariant,
    )
    fill_groups(stack.storage.integers, stack.storage.scales, stack.storage.minimums)
    return [_product(stack, rows_per_expert, device)]


def channel_workloads(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    element_dtype: torch.dtype,
    rows_per_expert: int,
    *,
    device: torch.device,
) -> list[Workload]:
    """Of `w8a8_experts`."""
    stack = ChannelQuantizedExperts(
        num_experts, out_features, in_features, _DTYPE, element_dtype, device=device, gated=bool(is_gated)
    )
    fill_channels(stack.elements, stack.scales)
    return [_product(stack, rows_per_expert, device)]


def _product(stack: ExpertStack, rows_per_expert: int, device: torch.device) -> Workload:
    """The one product of this stack, after its routing."""
    num_experts, in_features = len(stack), stack[0].in_features
    num_tokens, top_k = _num_tokens(num_experts, rows_per_expert)
    router = _normal(num_tokens, num_experts, device=device)
    routing = route(router, top_k, True, stack.block_m(num_tokens * top_k / num_experts))
    if stack[0].gated:
        x = _normal(num_tokens, in_features, device=device)
        return Workload(f"{num_tokens} tokens", [partial(stack.gate_up, x, routing)])
    activated = _normal(num_tokens * top_k, in_features, device=device)
    return Workload(f"{num_tokens} tokens", [partial(_down, stack, activated, routing)])


def _down(stack: ExpertStack, activated: Tensor, routing: Routing) -> Tensor:
    weighted = torch.empty(
        (routing.num_pairs, stack[0].out_features), dtype=torch.float32, device=activated.device
    )
    stack.down(activated, routing, weighted)
    return weighted


def _num_tokens(num_experts: int, rows_per_expert: int) -> tuple[int, int]:
    """And to how many experts each goes: two of Mixtral's few, eight of Qwen3's many."""
    top_k = 2 if num_experts <= 8 else 8
    return min(rows_per_expert, _MOST_ROWS) * num_experts // top_k, top_k


def _normal(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=_DTYPE, device=device).normal_()
