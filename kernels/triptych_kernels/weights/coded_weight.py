"""A linear layer's weight in the format of a published checkpoint, packed for the native kernels as coded.h draws it.

format of the file                                 held in bits per weight
Q4_K; Q5_K; Q6_K                                   4.63; 6.63; 6.56
Q2_K; Q3_K                                         5.13; 4.56          codes of 2 and 3 bits in 4
IQ4_XS; IQ4_NL                                     4.31; 4.5
4 bits, zero points, groups of 128                 4.19                GPTQ, AWQ, compressed-tensors
MXFP4; NVFP4                                       4.25; 4.5
nf4 and fp4 of bitsandbytes, groups of 64          4.5
e4m3, blocks of 128                                8.25
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import launch
from triptych_kernels.weights.base import Half
from triptych_kernels.weights.coded import CodedRows, CodeOrder, StoredCodes
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.layout import PanelLayout
from triptych_kernels.weights.packed import HALVES, AdapterOperands
from triptych_kernels.weights.quantized import QuantizedWeight, can_hold

_ORDERS: tuple[CodeOrder, ...] = ("rows", "words", "inputs")  # as coded_weight.cpp numbers them
_SIGNED_ZERO = 128  # is added to zero points and to the lower of two levels
_E8M0_BIAS = 127

_DTYPES_OF_SCALES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "k": torch.float16,
}


class CodedWeight(QuantizedWeight):
    """A weight [out_features, in_features] that keeps the codes and the scales of a file.

    Inputs are rounded as by `QuantizedWeight`, or to 16 bits where this machine has no products of bytes. If values of
    the format are no integers of 8 bits, they are not rounded: products are those of the file's weights in float32.
    Nor are inputs in bfloat16 where vectors multiply pairs of it, unless they are rounded to 8 bits.
    """

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        raise ValueError(f"a weight of {self.format} holds rows of a file only, which are quantized already")

    def fill_codes(self, first_row: int, rows: CodedRows, half: Half | None = None) -> None:
        assert rows.shape[1] == self.in_features, "rows of as many inputs"
        parts = _pack(rows, self.layout)
        codes = parts.codes
        launch(
            "pack_codes", parts.scales, form=self.layout.number, codes=codes.data,
            order=_ORDERS.index(codes.order), bits=codes.bits, stride=codes.stride, skip=codes.skip, shift=parts.shift,
            scales=parts.scales, offsets=parts.offsets, multiples=parts.multiples, minima=parts.minima,
            factors=parts.factors, panels=self.data, in_features=self.in_features, first_row=first_row,
            half=HALVES[half],
        )  # fmt: skip

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
            "coded_linear", x, **linear, form=self.layout.number,
            input_bits=self.input_bits, wide_rows=self.wide_rows,
        )  # fmt: skip
        return out

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(token_ids), self.in_features, dtype=out_dtype, device=token_ids.device)
        launch(
            "coded_embedding", token_ids, form=self.layout.number, out_dtype=DTYPES[out_dtype],
            panels=self.data, token_ids=token_ids, out=out, in_features=self.in_features,
        )  # fmt: skip
        return out

    @property
    def form(self) -> dict[str, int]:
        return {
            "kind": 3,
            "form": self.layout.number,
            "bits": 0,
            "affine": 0,
            "input_bits": self.input_bits,
            "wide_rows": self.wide_rows,
            "wide_bits": 16,
        }

    def _check(self, in_features: int, dtype: torch.dtype) -> None:
        if not can_hold(self.format, in_features, dtype):
            raise ValueError(f"a weight of {in_features} inputs in {dtype} cannot be held as {self.format}")


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Rows in the types in which panels store them; the fields of `PackCodes`."""

    codes: StoredCodes
    shift: int
    scales: Tensor
    offsets: Tensor | None = None
    multiples: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None


def _pack(rows: CodedRows, layout: PanelLayout) -> _Parts:
    """Bring rows into the types of panels.

    Raises:
        ValueError: The format does not hold them without loss.
    """
    to, own = layout.format, rows.format
    if not to.holds(own):
        raise ValueError(f"weights of {own} do not fit into {to} without loss")
    codes, shift = _held_codes(rows, layout)
    if to.scale == "k":
        return _pack_levels(rows, codes, shift, layout)
    factors = None
    scales = rows.group_scales()
    if to.scale == "e4m3":
        factors = torch.full((rows.shape[0],), rows.factor)
        scales = rows.scales.float()
    if own.table == "fp4" and not to.table:
        scales = scales / 2  # of which codes are twice the values
    offsets = None
    if to.offset == "zero":
        zeros = (
            torch.full_like(scales, 2.0 ** (own.bits - 1)) if rows.offsets is None else rows.offsets.float()
        )
        center = 2 ** (layout.bits - 1)
        offsets = _of_groups(_as_bytes(zeros - center + _SIGNED_ZERO, "zero point"), own, layout)
    elif to.offset == "minimum":
        minima = torch.zeros_like(scales) if rows.offsets is None else rows.group_minimums()
        if layout.bits == 8 and rows.offsets is None:
            minima = scales * -_SIGNED_ZERO
        offsets = _of_groups(_exactly(minima, to.scale, "minimum"), own, layout)
    return _Parts(
        codes, shift, _of_groups(_exactly(scales, to.scale, "scale"), own, layout), offsets, factors=factors
    )


def _held_codes(rows: CodedRows, layout: PanelLayout) -> tuple[StoredCodes, int]:
    """Return codes, and what is added to each, so that they are as panels count them."""
    own, to = rows.format, layout.format
    if own.table != to.table:  # integers of 8 bits take its values
        twice = 2 if own.table == "fp4" else 1
        return StoredCodes.of_bytes((rows.values() * twice + _SIGNED_ZERO).to(torch.uint8)), 0
    codes = rows.codes if isinstance(rows.codes, StoredCodes) else StoredCodes.of_bytes(rows.codes)
    if own.table or to.offset == "zero" or (own.offset != "none" and layout.bits != 6):
        return codes, 0
    if own.offset != "none" and own.bits > 5:
        raise ValueError(f"codes of {own} do not fit into {to}, where 6 bits have signs")
    # from the file's center to that of the panels
    center = 0 if own.offset != "none" else 2 ** (own.bits - 1)
    return codes, 2 ** (layout.bits - 1) - center


def _pack_levels(rows: CodedRows, codes: StoredCodes, shift: int, layout: PanelLayout) -> _Parts:
    assert rows.super_scales is not None, "scales are in two levels"
    own, to = rows.format, layout.format
    super_scales = _exactly(rows.super_scales.float() * rows.factor, "k", "scale")
    multiples = _of_groups(_as_bytes(rows.scales.float() + _SIGNED_ZERO, "multiple of a scale"), own, layout)
    if to.offset == "none":
        return _Parts(codes, shift, super_scales, multiples=multiples)
    offsets, super_minimums = rows.offsets, rows.super_minimums
    if offsets is None or super_minimums is None:
        offsets, super_minimums = torch.zeros_like(rows.scales), torch.zeros_like(rows.super_scales)
    minima = _of_groups(_as_bytes(offsets.float(), "multiple of a minimum"), own, layout)
    supers = _exactly(super_minimums.float() * rows.factor, "k", "minimum")
    return _Parts(codes, shift, super_scales, supers, multiples, minima)


def _of_groups(values: Tensor, own: QuantizedFormat, layout: PanelLayout) -> Tensor:
    """Repeat what groups of a file have for the smaller ones of the panels."""
    times = (own.group or layout.in_features) // layout.group
    return values.repeat_interleave(times, dim=1)[:, : layout.num_scales].contiguous()


def _exactly(values: Tensor, scale: str, what: str) -> Tensor:
    """Return float32 values in the precision of scales.

    Raises:
        ValueError: One of them does not fit it.
    """
    if scale == "e8m0":
        mantissas, exponents = torch.frexp(values)
        # a power of two below 2^-126, with which no product of usual inputs is a number, counts as 0
        stored = torch.where(exponents > 1 - _E8M0_BIAS, exponents - 1 + _E8M0_BIAS, 0)
        if bool(((mantissas != 0.5) & (values != 0)).any()):
            raise ValueError(f"a {what} is no power of two")
        return stored.to(torch.uint8)
    stored = values.to(_DTYPES_OF_SCALES[scale])
    if not torch.equal(stored.float(), values):
        raise ValueError(f"a {what} does not fit {_DTYPES_OF_SCALES[scale]} without loss")
    return stored.contiguous()


def _as_bytes(values: Tensor, what: str) -> Tensor:
    """Return whole numbers as uint8.

    Raises:
        ValueError: One of them is none, or is too large.
    """
    stored = values.clamp(0, 255).to(torch.uint8)
    if not torch.equal(stored.float(), values):
        raise ValueError(f"a {what} does not fit 8 bits")
    return stored.contiguous()
