"""Quantized weights of random numbers, filled where they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat

DTYPE = torch.bfloat16
"""Of what the weights are multiplied with."""
_FILLED_AT_ONCE = 1 << 28  # numbers, drawn in float32: 1 GiB


def group_weight(
    out_features: int,
    in_features: int,
    format: QuantizedFormat,
    device: torch.device,
    *,
    batch_invariant: bool = True,
) -> GroupQuantizedWeight:
    """Return a weight of integers in groups with a scale each, as w4a16."""
    weight = GroupQuantizedWeight(
        out_features, in_features, DTYPE, format, device=device, batch_invariant=batch_invariant
    )
    _fill_groups(weight.integers, weight.scales, weight.minimums)
    return weight


def channel_weight(
    out_features: int, in_features: int, element_dtype: torch.dtype, device: torch.device
) -> ChannelQuantizedWeight:
    """Return a weight of 8-bit elements with a scale per output, as w8a8."""
    weight = ChannelQuantizedWeight(out_features, in_features, DTYPE, element_dtype, device=device)
    _fill_channels(weight.elements, weight.scales)
    return weight


def group_experts(
    shape: tuple[int, int, int],
    format: QuantizedFormat,
    device: torch.device,
    *,
    gated: bool,
    batch_invariant: bool = True,
) -> GroupQuantizedExperts:
    """Return the same for all experts.

    Args:
        shape: [num_experts, out_features, in_features].
    """
    stack = GroupQuantizedExperts(
        *shape, DTYPE, format, device=device, gated=gated, batch_invariant=batch_invariant
    )
    _fill_groups(stack.storage.integers, stack.storage.scales, stack.storage.minimums)
    return stack


def channel_experts(
    shape: tuple[int, int, int], element_dtype: torch.dtype, device: torch.device, *, gated: bool
) -> ChannelQuantizedExperts:
    """Return the same for all experts."""
    stack = ChannelQuantizedExperts(*shape, DTYPE, element_dtype, device=device, gated=gated)
    _fill_channels(stack.elements, stack.scales)
    return stack


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
    for part in elements.view(-1).split(_FILLED_AT_ONCE):
        part.copy_(torch.randn(part.shape, device=part.device))
    scales.uniform_(0.01, 0.02)
