"""Workloads on which candidates are timed: calls of the op at real sizes, over operands that no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention_step import Heads, build_step
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe, gated_linear, linear
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.routing import Routing, route
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat

DECODES = (1, 8192), (16, 8192), (256, 1024)
"""Rows and keys of each: one stream, some, a full batch."""
PROMPTS = (1, 4096), (8, 512)
"""Prompts and tokens of each."""
_DTYPE = torch.bfloat16
FILLED_AT_ONCE = 1 << 28  # numbers, drawn in float32: 1 GiB
_UNCACHED_BYTES = 256 << 20  # four times the L2 of an H200
_MAX_COPIES = 16
_HEAD_DIM_TO_HEADS = {64: Heads(9, 3, 64), 128: Heads(32, 8, 128), 256: Heads(8, 4, 256)}
"""Heads of SmolLM2-135M, Llama-3.1-8B and Gemma-2-2B."""
_MOST_ROWS = 1024
"""Rows of an expert in the last bucket, which has no end: more only take longer."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One size of an operation."""

    name: str
    calls: Sequence[Callable[[], Tensor]]
    """Alike, but each reads weights or a cache of its own."""


def decode_workloads(
    head_dim: int, kv_dtype: torch.dtype, block_m: int, *, device: torch.device
) -> list[Workload]:
    """Return decodes; a block of more than 16 query heads is one group of them."""
    heads = _HEAD_DIM_TO_HEADS.get(head_dim, Heads(32, 8, head_dim))
    if block_m > 16:
        heads = Heads(block_m * heads.num_kv_heads, heads.num_kv_heads, head_dim)
    return [
        _attention(heads, rows, 1, keys, kv_dtype, device, f"{rows} rows of {keys:,} keys")
        for rows, keys in DECODES
    ]


def prefill_workloads(head_dim: int, kv_dtype: torch.dtype, *, device: torch.device) -> list[Workload]:
    heads = _HEAD_DIM_TO_HEADS.get(head_dim, Heads(32, 8, head_dim))
    return [
        _attention(heads, rows, tokens, tokens, kv_dtype, device, f"{rows} prompts of {tokens:,} tokens")
        for rows, tokens in PROMPTS
    ]


def few_rows_workloads(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    rows: int,
    *,
    device: torch.device,
    is_gated: bool,
) -> list[Workload]:
    """Return products with plain weights; a gated one has its activation."""
    multiply = gated_linear if is_gated else linear
    create = partial(_normal, out_features, in_features, dtype=dtype, device=device)
    x = _normal(rows, in_features, dtype=dtype, device=device)
    return [_products(create, lambda weight: multiply(x, weight, impl="triton"), rows, device)]


def group_workloads(
    out_features: int,
    in_features: int,
    bits: int,
    is_affine: bool,
    rows: int,
    *,
    device: torch.device,
    batch_invariant: bool,
) -> list[Workload]:
    """Return products with weights of integers in groups."""
    format = QuantizedFormat(bits, "minimum" if is_affine else "none")

    def create() -> GroupQuantizedWeight:
        weight = GroupQuantizedWeight(
            out_features, in_features, _DTYPE, format, device=device, batch_invariant=batch_invariant
        )
        _fill_groups(weight.integers, weight.scales, weight.minimums)
        return weight

    x = _normal(rows, in_features, device=device)
    return [_products(create, lambda weight: linear(x, weight), rows, device)]


def channel_workloads(
    out_features: int, in_features: int, element_dtype: torch.dtype, rows: int, *, device: torch.device
) -> list[Workload]:
    """Return products with 8-bit weights and inputs."""

    def create() -> ChannelQuantizedWeight:
        weight = ChannelQuantizedWeight(out_features, in_features, _DTYPE, element_dtype, device=device)
        _fill_channels(weight.elements, weight.scales)
        return weight

    x = _normal(rows, in_features, device=device)
    return [_products(create, lambda weight: linear(x, weight), rows, device)]


def plain_expert_workloads(
    num_experts: int, hidden_size: int, intermediate_size: int, rows_per_expert: int, *, device: torch.device
) -> list[Workload]:
    """Return the whole mixture, both products. The weights of one expert fill a cache."""
    num_tokens, top_k = _num_tokens(num_experts, rows_per_expert)
    w13 = _normal(num_experts, 2 * intermediate_size, hidden_size, device=device).mul_(0.02)
    w2 = _normal(num_experts, hidden_size, intermediate_size, device=device).mul_(0.02)
    x, router = (_normal(num_tokens, size, device=device) for size in (hidden_size, num_experts))
    call = partial(fused_moe, x, router, w13, w2, ExpertChoice(top_k), impl="triton")
    return [Workload(f"{num_tokens} tokens", [call])]


def group_expert_workloads(
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
    """Return one product of a mixture, after its routing."""
    format = QuantizedFormat(bits, "minimum" if is_affine else "none")
    shape = num_experts, out_features, in_features
    stack = GroupQuantizedExperts(
        *shape, _DTYPE, format, device=device, gated=bool(is_gated), batch_invariant=batch_invariant
    )
    _fill_groups(stack.storage.integers, stack.storage.scales, stack.storage.minimums)
    return [_expert_product(stack, rows_per_expert, device)]


def channel_expert_workloads(
    num_experts: int,
    out_features: int,
    in_features: int,
    is_gated: bool,
    element_dtype: torch.dtype,
    rows_per_expert: int,
    *,
    device: torch.device,
) -> list[Workload]:
    """Return the same with 8-bit weights and inputs."""
    shape = num_experts, out_features, in_features
    stack = ChannelQuantizedExperts(*shape, _DTYPE, element_dtype, device=device, gated=bool(is_gated))
    _fill_channels(stack.elements, stack.scales)
    return [_expert_product(stack, rows_per_expert, device)]


def _attention(
    heads: Heads,
    rows: int,
    query_len: int,
    num_keys: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> Workload:
    uncached_bytes = 0 if device.type == "meta" else _UNCACHED_BYTES
    step = build_step(
        heads,
        rows,
        query_len,
        num_keys,
        kv_dtype,
        device,
        uncached_bytes=uncached_bytes,
    )
    return Workload(name, [partial(step.attend, layer, "triton") for layer in range(len(step.kv_caches))])


def _products(
    create: Callable[[], Any], multiply: Callable[[Any], Tensor], rows: int, device: torch.device
) -> Workload:
    """Return products with as many weights as no cache holds; on the meta device, which only compiles, with one."""
    first = create()
    num_bytes = first.nbytes if isinstance(first, Tensor) else first.num_bytes
    num_copies = 1 if device.type == "meta" else min(max(-(-_UNCACHED_BYTES // num_bytes), 1), _MAX_COPIES)
    copies = [first, *(create() for _ in range(num_copies - 1))]
    return Workload(f"{rows} rows", [partial(multiply, weight) for weight in copies])


def _expert_product(stack: ExpertStack, rows_per_expert: int, device: torch.device) -> Workload:
    num_experts, in_features = len(stack), stack[0].in_features
    num_tokens, top_k = _num_tokens(num_experts, rows_per_expert)
    router = _normal(num_tokens, num_experts, device=device)
    routing = route(router, ExpertChoice(top_k), stack.block_m(num_tokens * top_k / num_experts))
    if stack[0].gated:
        call = partial(stack.gate_up, _normal(num_tokens, in_features, device=device), routing)
    else:
        call = partial(_down, stack, _normal(num_tokens * top_k, in_features, device=device), routing)
    return Workload(f"{num_tokens} tokens", [call])


def _down(stack: ExpertStack, activated: Tensor, routing: Routing) -> Tensor:
    shape = (routing.num_pairs, stack[0].out_features)
    weighted = torch.empty(shape, dtype=torch.float32, device=activated.device)
    stack.down(activated, routing, weighted)
    return weighted


def _num_tokens(num_experts: int, rows_per_expert: int) -> tuple[int, int]:
    """Return the tokens, and to how many experts each goes: two of Mixtral's few, eight of Qwen3's many."""
    top_k = 2 if num_experts <= 8 else 8
    return min(rows_per_expert, _MOST_ROWS) * num_experts // top_k, top_k


def _normal(*shape: int, device: torch.device, dtype: torch.dtype = _DTYPE) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _fill_groups(integers: Tensor, scales: Tensor, minimums: Tensor | None) -> None:
    """Draw any integers, and scales and minimums of the size that weights have."""
    integers.random_()
    scales.uniform_(0.005, 0.01)
    if minimums is not None:
        minimums.uniform_(-0.08, -0.04)


def _fill_channels(elements: Tensor, scales: Tensor) -> None:
    """Draw integers of all sizes, or floats around one, and scales that make weights of the size that they have."""
    if elements.dtype == torch.int8:
        elements.random_(-127, 128)
        scales.uniform_(0.0002, 0.0004)
        return
    for part in elements.view(-1).split(FILLED_AT_ONCE):
        part.copy_(torch.randn(part.shape, device=part.device))
    scales.uniform_(0.01, 0.02)
