"""What this device can do: how fast it copies memory and multiplies matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.gpu_figures.rows import Measured, Row, Sizes
from benchmarks.gpu_figures.timing import Call, Timing, time_calls


class Bench:
    """What every section needs: device, sizes, and the device's limits, measured at first use."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        self.dtype = torch.bfloat16
        """Of activations and weights."""

    @cached_property
    def copy_timing(self) -> Timing:
        source = self.normal(self.sizes.copy_bytes // 2)
        target = torch.empty_like(source)
        return self.time([lambda: target.copy_(source)])

    @cached_property
    def matrix_timing(self) -> Timing:
        size = self.sizes.matrix
        # random, since products of zeros take less power and run faster than any real ones
        left, right = self.normal(size, size), self.normal(size, size)
        return self.time([lambda: left @ right])

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        return 2 * self.sizes.copy_bytes / self.copy_timing.median

    @property
    def matrix_rate(self) -> float:
        """Floating-point operations per second of a large bfloat16 product."""
        return float(2 * self.sizes.matrix**3 / self.matrix_timing.median)

    def normal(self, *shape: int) -> Tensor:
        """Fresh random numbers, in `dtype`."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def num_copies(self, operand_bytes: int) -> int:
        """How many operands of this size no cache holds together."""
        return min(max(-(-self.sizes.uncached_bytes // max(operand_bytes, 1)), 1), 64)

    def time(self, calls: Sequence[Call]) -> Timing:
        return time_calls(calls, self.device, round_s=self.sizes.round_s)

    def as_bandwidth(self, timing: Timing, num_bytes: int) -> Measured:
        """GB/s beside those of a copy."""
        return _as_rate(timing, num_bytes / 1e9, "GB/s", self.bandwidth / 1e9, "copy bandwidth")

    def as_matrix_rate(self, timing: Timing, num_operations: float) -> Measured:
        """TFLOP/s beside those of a large product."""
        return _as_rate(timing, num_operations / 1e12, "TFLOP/s", self.matrix_rate / 1e12, "matrix rate")


def limit_rows(bench: Bench) -> Iterator[Row]:
    """The limits themselves."""

    def copy() -> Measured:
        return _as_rate(bench.copy_timing, 2 * bench.sizes.copy_bytes / 1e9, "GB/s", None, "")

    def multiply() -> Measured:
        return _as_rate(bench.matrix_timing, 2 * bench.sizes.matrix**3 / 1e12, "TFLOP/s", None, "")

    yield Row("limits", f"copy of {bench.sizes.copy_bytes:,} bytes, read + written", copy)
    yield Row("limits", f"bf16 product of {bench.sizes.matrix:,} x {bench.sizes.matrix:,}", multiply)


def _as_rate(timing: Timing, amount: float, unit: str, limit: float | None, limit_name: str) -> Measured:
    return Measured(
        amount / timing.median,
        unit,
        limit,
        limit_name,
        low=amount / timing.high,
        high=amount / timing.low,
        note=timing.note,
    )
