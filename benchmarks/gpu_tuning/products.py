"""Workloads of products, at the rows that a bucket ends with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_tuning.workload import Workload, num_copies
from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.formats import QuantizedFormat

_DTYPE = torch.bfloat16
_FILLED_AT_ONCE = 1 << 28  # numbers, drawn in float32: 1 GiB


def few_rows_workloads(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    rows: int,
    *,
    device: torch.device,
    is_gated: bool,
) -> list[Workload]:
    """Of `linear_few_rows` and `gated_linear_few_rows`, with its activation."""
    multiply = gated_linear if is_gated else linear

    def create() -> Tensor:
        return torch.empty((out_features, in_features), dtype=dtype, device=device).normal_()

    weights = [create()]
    if device.type != "meta":
        weights += (create() for _ in range(num_copies(weights[0].nbytes) - 1))
    x = torch.empty((rows, in_features), dtype=dtype, device=device).normal_()
    return [Workload(f"{rows} rows", [partial(multiply, x, weight, impl="triton") for weight in weights])]


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
    """Of `quantized_linear`, and where rows need not be batch-invariant of `quantized_linear_by_weights`."""
    format = QuantizedFormat(bits, is_affine=bool(is_affine))

    def create() -> LinearWeight:
        weight = GroupQuantizedWeight(
            out_features, in_features, _DTYPE, format, device=device, batch_invariant=batch_invariant
        )
        fill_groups(weight.integers, weight.scales, weight.minimums)
        return weight

    return [_workload(create, rows, in_features, device)]


def channel_workloads(
    out_features: int, in_features: int, element_dtype: torch.dtype, rows: int, *, device: torch.device
) -> list[Workload]:
    """Of `w8a8_linear`."""

    def create() -> LinearWeight:
        weight = ChannelQuantizedWeight(out_features, in_features, _DTYPE, element_dtype, device=device)
        fill_channels(weight.elements, weight.scales)
        return weight

    return [_workload(create, rows, in_features, device)]


def fill_groups(integers: Tensor, scales: Tensor, minimums: Tensor | None) -> None:
    """Any integers, with scales and minimums of the size that weights have."""
    integers.random_()
    scales.uniform_(0.005, 0.01)
    if minimums is not None:
        minimums.uniform_(-0.08, -0.04)


def fill_channels(elements: Tensor, scales: Tensor) -> None:
    """Integers of all sizes, or floats around one; scales so that weights are of the size that they have."""
    if elements.dtype == torch.int8:
        elements.random_(-127, 128)
        scales.uniform_(0.0002, 0.0004)
        return
    for part in elements.view(-1).split(_FILLED_AT_ONCE):
        part.copy_(torch.randn(part.shape, device=part.device))
    scales.uniform_(0.01, 0.02)


def _workload(
    create: Callable[[], LinearWeight], rows: int, in_features: int, device: torch.device
) -> Workload:
    weights = [create()]
    if device.type != "meta":
        weights += (create() for _ in range(num_copies(weights[0].num_bytes) - 1))
    x = torch.empty((rows, in_features), dtype=_DTYPE, device=device).normal_()
    return Workload(f"{rows} rows", [partial(linear, x, weight) for weight in weights])
