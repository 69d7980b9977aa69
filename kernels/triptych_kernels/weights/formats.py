"""Weights of 4 and 8 bits: what the integers of a group mean, whichever device holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

GROUP_SIZE = 32
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """How the integers of a group become weights: `scale * q`, and in affine formats `scale * q + minimum`."""

    bits: int
    """4 or 8."""
    is_affine: bool

    @property
    def group_bytes(self) -> int:
        """Of one output."""
        return GROUP_SIZE * self.bits // 8 + (4 if self.is_affine else 2)

    def holds(self, other: QuantizedFormat) -> bool:
        """Whether it can hold whatever `other` holds, without loss."""
        # a symmetric 4-bit group is an affine one whose minimum is -8 scales
        return self.bits >= other.bits and self.is_affine >= other.is_affine


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Weights of 8 bits with a scale per output; products round their inputs likewise, with a scale per row."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn."""


BLOCK_FORMATS = {
    "Q4_0": QuantizedFormat(4, is_affine=False),
    "Q4_1": QuantizedFormat(4, is_affine=True),
    "Q8_0": QuantizedFormat(8, is_affine=False),
}
"""Forms of GGUF files whose blocks can be kept -> the smallest format that holds them."""


def common_format(formats: Iterable[QuantizedFormat]) -> QuantizedFormat:
    """The smallest that holds all of these without loss."""
    formats = list(formats)
    return QuantizedFormat(max(f.bits for f in formats), any(f.is_affine for f in formats))
