"""A linear layer's weight in 4 or 8 bits, packed for the native kernels as quantized.h draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.weights.base import BlockWeight, Half
from triptych_kernels.weights.formats import (
    GGUF_FORMATS,
    GROUP_SIZE,
    PANEL_FORMATS,
    SUPER_GROUP_SIZE,
    QuantizedFormat,
)
from triptych_kernels.weights.layout import PanelLayout
from triptych_kernels.weights.packed import HALVES, AdapterOperands, PackedWeight

NEVER = 2**62
"""A number of rows that no product has."""

# Shares of the rate of 8-bit products that one core of Zen 4 has, 256 rows of 576 -> 3,072: wide bytes 60%, narrow
# inputs of 8 bits 58%, bfloat16 45%, narrow inputs of 16 bits 39%. Tiles of AMX multiply bfloat16 at four times the
# rate at which vectors multiply bytes there; tiles of bytes would have a sum to finish per 32 inputs, which costs what
# they gain.
_WITH_WIDE_BYTES = ("avx512_bf16", "avx512_vnni")
_WITH_WIDE_BFLOAT16 = ("avx512_bf16",)
_WITH_TILES = ("amx",)

Kind = tuple[int, int, QuantizedFormat]
"""Shape and format of a weight: (out_features, in_features, format)."""


@dataclass(frozen=True, slots=True)
class Wide:
    """An arithmetic of many rows."""

    num_rows: int
    """Fewest rows that are multiplied so."""
    bits: Literal[8, 16]
    """As `QuantizedWeight.wide_bits`."""


_SCALES_OF_MINIMUMS = ("float16", "bfloat16", "float32")


class QuantizedWeight(PackedWeight, BlockWeight):
    """A weight [out_features, in_features] of one or several projections, for inputs in float32 and bfloat16.

    Products round their inputs to integers, group by group, and multiply integers exactly. Integers of 16 bits are
    finer than bfloat16; those of 8 bits (`input_bits`) are faster.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        format: QuantizedFormat,
        *,
        gated: bool = False,
        bias: bool = False,
    ) -> None:
        """Allocate a weight of zeros, packed for the instruction set in use.

        Args:
            out_features: Number of outputs of all projections together.
            in_features: A multiple of `GROUP_SIZE`.
            dtype: Default dtype of looked-up rows.
            format: Bits, and whether groups have minimums.
            gated: Whether the two halves of `out_features` are an MLP's gate and up, which are multiplied.
            bias: Whether there is one.
        Raises:
            ValueError: There is no kernel for this dtype or number of inputs.
        """
        self.format = format
        self.layout = PanelLayout(format, in_features)
        super().__init__(out_features, in_features, dtype, gated=gated, bias=bias)
        self.input_bits: Literal[8, 16] = 16
        """Bits of the integers that inputs are rounded to, with a scale per row and group. 8 are multiplied faster
        than 16, and are coarser than bfloat16. Read when a product is called or recorded."""
        self.wide_rows = NEVER
        """Fewest rows that are multiplied as `wide_bits` says. That is faster for many rows; their results then differ
        from those of fewer rows. Read when a product is called or recorded; written by `allow_wide_products`."""
        self.wide_bits: Literal[8, 16] = 16
        """16: many rows are multiplied in bfloat16, with weights rounded to it. 8: in bytes as wide_bytes.h describes,
        with inputs rounded and weights kept, which must be of 4 bits."""

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(DTYPES)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        """Quantize rows [n, in_features] into output `first_row` and those after it, counted within the half.

        Rounding is that of GGML's reference quantizers. In the affine 4-bit format each group becomes a Q4_0 or a
        Q4_1, whichever is nearer to it.
        """
        rows = rows.float().contiguous()
        launch("pack_quantized", rows, rows=rows, **self._format, **self._place(first_row, half))

    def keeps_blocks(self, type: str) -> bool:
        stored = GGUF_FORMATS.get(type)
        if stored is None or not self.format.holds(stored):
            return False
        # else scales are converted, or values take the place of codes
        return (self.format.table, self.format.scale) == (stored.table, stored.scale)

    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        if not self.keeps_blocks(type):
            raise ValueError(f"{type} blocks do not fit into {self.format}")
        assert data.stride(1) == 1, "the blocks of a row lie one after the other"
        is_damaged = torch.zeros(1, dtype=torch.int64)
        launch(
            "pack_blocks", data, form=self.layout.number, type=list(GGUF_FORMATS).index(type), blocks=data,
            row_bytes=data.stride(0), is_damaged=is_damaged, **self._place(first_row, half),
        )  # fmt: skip
        if int(is_damaged):
            raise ValueError("a block's scale or minimum is no number; the file is damaged, fetch it again")

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        activation: str | None = None,
        adapters: AdapterOperands | None = None,
    ) -> Tensor:
        out = self._new_output(x, out_dtype, activation)
        operands = self.linear_operands(x, out, activation, adapters)
        linear = {f"linear_{field}": operand for field, operand in operands.items()}
        launch(
            "quantized_linear",
            x,
            **linear,
            **self._format,
            input_bits=self.input_bits,
            wide_rows=self.wide_rows,
            wide_bits=self.wide_bits,
        )
        return out

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(token_ids), self.in_features, dtype=out_dtype, device=token_ids.device)
        launch(
            "quantized_embedding", token_ids, **self._format, out_dtype=DTYPES[out_dtype], panels=self.data,
            token_ids=token_ids, out=out, in_features=self.in_features,
        )  # fmt: skip
        return out

    @property
    def form(self) -> dict[str, int]:
        return {
            "kind": 2,
            "form": 0,
            **self._format,
            "input_bits": self.input_bits,
            "wide_rows": self.wide_rows,
            "wide_bits": self.wide_bits,
        }

    @property
    def _format(self) -> dict[str, int]:
        return {"bits": self.format.bits, "affine": self.format.is_affine}

    def _place(self, first_row: int, half: Half | None) -> dict[str, Operand]:
        return {
            "panels": self.data,
            "in_features": self.in_features,
            "first_row": first_row,
            "half": HALVES[half],
        }

    def _check(self, in_features: int, dtype: torch.dtype) -> None:
        if self.format not in PANEL_FORMATS or not can_quantize(in_features, dtype):
            raise ValueError(
                f"a weight of {in_features} inputs in {dtype} cannot be quantized to {self.format}"
            )

    def _allocate(self, num_outputs: int) -> Tensor:
        return zeros_in_huge_pages((num_outputs * self.layout.output_bytes,), torch.uint8)


def can_quantize(in_features: int, dtype: torch.dtype) -> bool:
    """Return whether this machine has native products for such a weight."""
    return bool(isa()) and dtype in DTYPES and in_features % GROUP_SIZE == 0


def can_hold(format: QuantizedFormat, in_features: int, dtype: torch.dtype) -> bool:
    """Return whether this machine has native products for weights of this format, held as they are: those of
    `PANEL_FORMATS` by `QuantizedWeight`, others by `CodedWeight`.

    Args:
        dtype: Dtype of the inputs.
    """
    if not can_quantize(in_features, dtype):
        return False
    group = format.group
    if format.scale == "k":
        return group in (16, 32) and in_features % SUPER_GROUP_SIZE == 0 and format.offset != "zero"
    if group % 16 or group & (group - 1):
        return False
    if format.table:
        return format.offset == "none" and format.bits == (8 if format.table == "e4m3" else 4)
    return 1 <= format.bits <= 8 and (format.offset != "minimum" or format.scale in _SCALES_OF_MINIMUMS)


def allow_wide_products(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> dict[Kind, Wide]:
    """Let these weights multiply many rows in another arithmetic where that is faster with the instruction set in use.

    A recording of products keeps the choice, so call this when `input_bits` of the weights are set, and first.

    Args:
        dtype: Dtype of the inputs.

    Returns:
        Kind of weight -> the other arithmetic, for the kinds that have one.
    """
    chosen: dict[Kind, Wide] = {}
    for weight in weights:
        # weights that are no panels of 4 bits are not turned: they count as if they had 8; floats are float32
        bits = (
            weight.format.bits if weight.format in PANEL_FORMATS else 8 if weight.format.has_integers else 32
        )
        wide = choose_wide(isa(), bits, weight.input_bits, dtype)
        if wide is not None:
            weight.wide_rows, weight.wide_bits = wide.num_rows, wide.bits
            chosen[_kind(weight)] = wide
    return chosen


def choose_wide(isa: str, weight_bits: int, input_bits: int, dtype: torch.dtype) -> Wide | None:
    """Return the arithmetic of many rows, or None where that of few rows is the fastest.

    It is a choice by instruction set and no measurement, so that equal machines choose alike.
    """
    if isa in _WITH_WIDE_BYTES and weight_bits == 4 and input_bits == 8:
        return Wide(num_rows=128, bits=8)
    # of inputs in float32 bfloat16 would lose what the config asks for
    if dtype == torch.bfloat16 and (isa in _WITH_TILES or (isa in _WITH_WIDE_BFLOAT16 and input_bits == 16)):
        if isa not in _WITH_TILES:
            return Wide(num_rows=64, bits=16)
        # tiles wait for unpacking, which few rows of sums of bytes do as fast
        return Wide(num_rows=32 if weight_bits < 32 and input_bits == 8 else 12, bits=16)
    return None


def _kind(weight: QuantizedWeight) -> Kind:
    return weight.out_features, weight.in_features, weight.format
