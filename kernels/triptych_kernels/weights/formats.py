"""Formats of weights in 4 and 8 bits, the same on every device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

GROUP_SIZE = 32
"""Number of inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format with a scale per group of inputs.

    An integer q of a group means the weight `scale * q`, in affine formats for `scale * q + minimum`.
    """

    bits: int
    """4 or 8."""
    is_affine: bool

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of one output."""
        return GROUP_SIZE * self.bits // 8 + (4 if self.is_affine else 2)

    def holds(self, other: QuantizedFormat) -> bool:
        """Return whether this format holds all weights of `other` without loss."""
        # a symmetric 4-bit group is an affine one with a minimum of -8 scales
        return self.bits >= other.bits and self.is_affine >= other.is_affine


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """A format of 8 bits with a scale per output. Products round their inputs to it too, with a scale per row."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn."""


BLOCK_FORMATS = {
    "Q4_0": QuantizedFormat(4, is_affine=False),
    "Q4_1": QuantizedFormat(4, is_affine=True),
    "Q8_0": QuantizedFormat(8, is_affine=False),
}
"""Block types of GGUF files that can be kept as they are -> the smallest format that holds them."""


def common_format(formats: Iterable[QuantizedFormat]) -> QuantizedFormat:
    """Return the smallest format that holds all of these without loss."""
    formats = list(formats)
    return QuantizedFormat(max(f.bits for f in formats), any(f.is_affine for f in formats))
