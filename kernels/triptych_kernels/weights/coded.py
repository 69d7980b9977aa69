"""Quantized weights as their files mean them, unpacked: what readers of checkpoints hand to weights.

codes     [rows, in_features]           c c c c c c c c | c c c c c c c c | …
scales    [rows, groups]                       s        |        s        | …
offsets   [rows, groups]                       m        |        m        | …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from triptych_kernels.weights.formats import (
    BLOCK_FORMATS,
    GROUP_SIZE,
    SUPER_GROUP_SIZE,
    TABLES,
    QuantizedFormat,
)

CodeOrder = Literal["rows", "words", "inputs"]
"""How codes lie in a file: rows of codes; words of each row's codes, with the rows of a word side by side, as GPTQ has
them; or inputs first, with 8 rows in a word, as AWQ has them. Numbered as by `CodeOrder` in coded_weight.cpp."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredCodes:
    """Codes as a file packs them, which a kernel unpacks while it fills a weight."""

    shape: tuple[int, int]
    """[rows, in_features], the latter a multiple of 32."""
    data: Tensor
    """A view of the file: [rows, words or bytes], [words, rows], or [in_features, words of 8 rows]."""
    order: CodeOrder
    bits: int
    """Bits of a code. All codes of a row, or with `inputs` of a word, are one stream, the lowest bits first."""
    unpack: Callable[[], Tensor]
    """Returns [rows, in_features] uint8."""
    skip: int = 0
    """Rows of the first word that are not meant, with `inputs`."""

    @classmethod
    def of_bytes(cls, codes: Tensor) -> StoredCodes:
        """Return codes [rows, in_features] uint8 in this form."""
        return cls((codes.shape[0], codes.shape[1]), codes.contiguous(), "rows", 8, lambda: codes)

    @property
    def stride(self) -> int:
        """Bytes from one row, word or input to the next."""
        return self.data.stride(0) * self.data.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Rows of a weight, exactly as a file means them."""

    format: QuantizedFormat
    codes: Tensor | StoredCodes
    """[rows, in_features] uint8, without signs, inputs in the order of the model; or as they are packed."""
    scales: Tensor
    """[rows, groups] of any dtype that holds them, in a format with scales in two levels the integers. The last group
    may be smaller."""
    offsets: Tensor | None = None
    """[rows, groups]: minimums, of two levels the integers that `super_minimums` multiply and that are subtracted; or
    zero points, whole numbers. None if the format has none."""
    factor: float = 1.0
    """Multiplies all weights."""
    super_scales: Tensor | None = None
    """[rows, in_features / 256], of scales in two levels only."""
    super_minimums: Tensor | None = None
    """[rows, in_features / 256], of minimums in two levels only."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def unpacked(self) -> Tensor:
        """Return the codes, [rows, in_features] uint8."""
        return self.codes.unpack() if isinstance(self.codes, StoredCodes) else self.codes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [rows, in_features], computed in float32 and then rounded to `dtype`."""
        values = self.values()
        weights = values * self._of_inputs(self.group_scales())
        if self.offsets is not None:
            weights = weights + self._of_inputs(self.group_minimums())
        return weights.to(dtype)

    def values(self) -> Tensor:
        """Return what each code's scale multiplies, [rows, in_features] float32, without the offset."""
        format = self.format
        if format.table == "e4m3":
            return self.unpacked().view(torch.float8_e4m3fn).float()
        if format.table:
            return torch.tensor(TABLES[format.table])[self.unpacked().long()]
        return self.unpacked().float() - (0 if format.offset != "none" else 2 ** (format.bits - 1))

    def group_scales(self) -> Tensor:
        """Return the scales of the groups, [rows, groups] float32, with all levels and the factor."""
        return self._of_groups(self.scales, self.super_scales) * self.factor

    def group_minimums(self) -> Tensor:
        """Return what is added to the weights of each group, [rows, groups] float32; there are offsets."""
        assert self.offsets is not None, "the format has no offsets"
        if self.format.offset == "zero":
            return self.group_scales() * -self.offsets.float()
        sign = 1 if self.super_minimums is None else -1
        return self._of_groups(self.offsets, self.super_minimums) * (sign * self.factor)

    def is_finite(self) -> bool:
        """Return whether all weights are numbers in float32; scales that are numbers can be too large for that."""
        format = self.format
        values = TABLES.get(format.table) or (448.0,)  # the largest e4m3
        largest = max(map(abs, values)) if format.table else 2.0**format.bits
        bound = self.group_scales().abs() * largest
        if self.offsets is not None:
            bound = bound + self.group_minimums().abs()
        if bool(torch.isfinite(bound).all()):
            return True
        return bool(torch.isfinite(self.dequantize(torch.float32)).all())

    def narrow(self, dim: int, start: int, length: int) -> CodedRows:
        """Return a part, as `Tensor.narrow` does.

        Raises:
            ValueError: It cuts a group of inputs that share a scale.
        """
        if dim == 0:
            return self._narrowed(lambda tensor, group: tensor.narrow(0, start, length))
        whole = self.format.group if self.super_scales is None else SUPER_GROUP_SIZE
        if whole and (start % whole or (length % whole and start + length != self.shape[1])):
            raise ValueError(
                f"inputs {start} to {start + length} of {self.shape[1]} cut a group of {whole} that share a scale"
            )

        def part(tensor: Tensor, group: int) -> Tensor:
            return tensor.narrow(1, start // group, -(-length // group)) if group else tensor

        return self._narrowed(part)

    def _narrowed(self, part: Callable[[Tensor, int], Tensor]) -> CodedRows:
        """Return these rows with a part of each tensor: of (tensor, inputs per element, 0 for all)."""
        group = self.format.group

        def optional(tensor: Tensor | None, group: int) -> Tensor | None:
            return None if tensor is None else part(tensor, group)

        return replace(
            self,
            codes=part(self.unpacked(), 1),
            scales=part(self.scales, group),
            offsets=optional(self.offsets, group),
            super_scales=optional(self.super_scales, SUPER_GROUP_SIZE),
            super_minimums=optional(self.super_minimums, SUPER_GROUP_SIZE),
        )

    def _of_groups(self, values: Tensor, supers: Tensor | None) -> Tensor:
        values = values.float()
        if supers is None:
            return values
        per_super = SUPER_GROUP_SIZE // self.format.group
        return values * supers.float().repeat_interleave(per_super, dim=1)

    def _of_inputs(self, values: Tensor) -> Tensor:
        size = self.shape[1]
        return values.repeat_interleave(self.format.group or size, dim=1)[:, :size]


def as_blocks(rows: CodedRows) -> tuple[str, Tensor]:
    """Return rows of a format of `BLOCK_FORMATS` as blocks of a GGUF file: their type, and [rows, bytes] uint8.

    Rows that differ from Q8_0 in having codes of fewer bits are one.

    Raises:
        ValueError: It is another format, or a scale is no float16.
    """
    widest = BLOCK_FORMATS["Q8_0"]
    if rows.format not in BLOCK_FORMATS.values() and replace(rows.format, bits=widest.bits) == widest:
        center = 2 ** (widest.bits - 1) - 2 ** (rows.format.bits - 1)
        rows = replace(rows, format=widest, codes=rows.unpacked() + center)
    type = next((type for type, format in BLOCK_FORMATS.items() if format == rows.format), None)
    if type is None:
        raise ValueError(f"{rows.format} is not the format of {', '.join(BLOCK_FORMATS)}")
    heads = [_as_halves(rows.group_scales())]
    if rows.offsets is not None:
        heads.append(_as_halves(rows.group_minimums()))
    codes = rows.unpacked().unflatten(1, (-1, GROUP_SIZE))
    if rows.format.bits == 4:
        integers = codes[..., : GROUP_SIZE // 2] | codes[..., GROUP_SIZE // 2 :] << 4
    else:
        integers = codes ^ 0x80  # to two's complement
    return type, torch.cat([*heads, integers], dim=-1).flatten(1)


def _as_halves(values: Tensor) -> Tensor:
    """Return float16 as bytes, [rows, groups, 2].

    Raises:
        ValueError: A value is none.
    """
    halves = values.half()
    if not torch.equal(halves.float(), values):
        raise ValueError("a scale or a minimum does not fit float16 without loss")
    return halves[..., None].view(torch.uint8)
