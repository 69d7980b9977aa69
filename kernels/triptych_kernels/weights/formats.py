"""Formats of quantized weights, the same on every device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch

GROUP_SIZE = 32
"""Number of inputs that share a scale in the formats of `PANEL_FORMATS`."""
SUPER_GROUP_SIZE = 256
"""Number of inputs that share the float16 scale of a format with scales in two levels."""

Offset = Literal["none", "minimum", "zero"]
Table = Literal["", "nf4", "bnb_fp4", "fp4", "iq4_nl", "e4m3"]
Scale = Literal["float16", "bfloat16", "float32", "e8m0", "e4m3", "k"]

TABLES: dict[Table, tuple[float, ...]] = {
    "fp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "bnb_fp4": tuple(
        sign * value / 12.0
        for sign in (1.0, -1.0)
        for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
}  # fmt: skip
"""Values of the codes of 4 bits that are read from a table.

Source: e2m1 of the OCP Microscaling Formats specification; `kvalues_iq4nl` of ggml-common.h in llama.cpp; bitsandbytes'
`get_4bit_type`, of which the values are float32.
"""
_INTEGER_TABLES = ("", "fp4", "iq4_nl")  # of which values, or twice the values, are integers of 8 bits


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format of integer codes with a scale per group of inputs.

    A code means the weight `scale * value(code)`, `scale * code + minimum` or `scale * (code - zero)`.
    """

    bits: int
    """Bits of a code, 1 to 8."""
    offset: Offset = "none"
    """`none`: a code's value is `code - 2**(bits - 1)`, or what the table says."""
    group: int = GROUP_SIZE
    """Number of inputs that share a scale: 16, 32 or a larger power of two; 0: all of a row."""
    table: Table = ""
    """Name in `TABLES`, `e4m3` for codes that are such floats, or empty: codes are integers."""
    scale: Scale = "float16"
    """Precision of the scales, and of minimums. `k`: a float16 per 256 inputs and an integer of 8 bits per group that
    multiplies it; minimums likewise."""

    @property
    def is_affine(self) -> bool:
        return self.offset == "minimum"

    @property
    def has_integers(self) -> bool:
        """Whether values are integers of 8 bits, in units of their own."""
        return self.table in _INTEGER_TABLES

    def holds(self, other: QuantizedFormat) -> bool:
        """Return whether this format holds all weights of `other` without loss."""
        try:
            return _common(self, other) == self
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """A format of 8 bits with a scale per output. Products round their inputs to it too, with a scale per row."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn."""


BLOCK_FORMATS = {
    "Q4_0": QuantizedFormat(4),
    "Q4_1": QuantizedFormat(4, "minimum"),
    "Q8_0": QuantizedFormat(8),
}
"""Block types of GGUF files that can be kept as they are -> the smallest format that holds them."""
GGUF_FORMATS = BLOCK_FORMATS | {
    "Q5_0": QuantizedFormat(5),
    "Q5_1": QuantizedFormat(5, "minimum"),
    "IQ4_NL": QuantizedFormat(4, table="iq4_nl"),
    "MXFP4": QuantizedFormat(4, table="fp4", scale="e8m0"),
    "Q2_K": QuantizedFormat(2, "minimum", 16, scale="k"),
    "Q3_K": QuantizedFormat(3, "none", 16, scale="k"),
    "Q4_K": QuantizedFormat(4, "minimum", scale="k"),
    "Q5_K": QuantizedFormat(5, "minimum", scale="k"),
    "Q6_K": QuantizedFormat(6, "none", 16, scale="k"),
    "IQ4_XS": QuantizedFormat(4, table="iq4_nl", scale="k"),
}
"""Block types of GGUF files that have codes -> their format, as pack_blocks.cpp numbers them."""
PANEL_FORMATS = (*BLOCK_FORMATS.values(), QuantizedFormat(8, "minimum"))
"""Formats of `QuantizedWeight` and of Triton's weights. The last holds a Q4_1 beside a Q8_0: its codes have signs."""


def common_format(formats: Iterable[QuantizedFormat]) -> QuantizedFormat:
    """Return the smallest format that can hold each of these. Nothing is rounded.

    Raises:
        ValueError: There is none; names two of them.
    """
    return reduce(_common, formats)


def _common(one: QuantizedFormat, other: QuantizedFormat) -> QuantizedFormat:
    if one == other:
        return one
    if one in PANEL_FORMATS and other in PANEL_FORMATS:
        # a symmetric 4-bit group is an affine one with a minimum of -8 scales
        is_affine = one.is_affine or other.is_affine
        return QuantizedFormat(max(one.bits, other.bits), "minimum" if is_affine else "none")
    bits, table, scale = max(one.bits, other.bits), one.table, one.scale
    if one.table != other.table:
        if not one.has_integers or not other.has_integers:
            raise ValueError(f"no format holds both {one} and {other} without loss")
        bits, table = 8, ""
    if one.scale != other.scale or one.table != other.table:
        scale = "float32"
    offset = one.offset
    if one.offset != other.offset:
        offset = "minimum" if "minimum" in (one.offset, other.offset) else "zero"
        if offset == "minimum":  # codes then have signs, so that those without a minimum need none
            bits = 6 if bits <= 6 else 8
            scale = "k" if scale == "k" and bits == 6 else "float32"
    groups = [group for group in (one.group, other.group) if group]
    return QuantizedFormat(bits, offset, min(groups, default=0), table, scale)
