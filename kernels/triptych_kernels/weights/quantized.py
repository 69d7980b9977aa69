"""A linear layer's weight in 4 or 8 bits, packed for the native kernels as quantized.h draws it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.cpu.library import DTYPES, isa
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.weights.base import BlockWeight, Half
from triptych_kernels.weights.formats import BLOCK_FORMATS, GROUP_SIZE, QuantizedFormat
from triptych_kernels.weights.packed import HALVES, PackedWeight

NEVER = 2**62
"""A number of rows that no product has."""

_CROSSOVER_ROWS = (64, 128, 256, 512)
_ROUNDS = 4  # the fastest counts, since other processes may compute at the same time
_ENOUGH_S = 0.02  # products that take this long together are not repeated
_WORTHWHILE = 0.95  # fraction of the narrow product's time; a smaller gain may be noise

Kind = tuple[int, int, bool, QuantizedFormat]
"""Weights that multiply at the same speed: (out_features, in_features, gated, format)."""

_BLOCK_TYPES = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}  # BlockType in quantized_weight.cpp


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

    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        if not self.format.holds(BLOCK_FORMATS[type]):
            raise ValueError(f"{type} blocks do not fit into {self.format}")
        data = data.contiguous()
        launch(
            "pack_blocks",
            data,
            blocks=data,
            type=_BLOCK_TYPES[type],
            **self._format,
            **self._place(first_row, half),
        )

    def multiply(self, x: Tensor, out_dtype: torch.dtype, activation: str | None = None) -> Tensor:
        out = self._new_output(x, out_dtype, activation)
        linear = {
            f"linear_{field}": operand for field, operand in self.linear_operands(x, out, activation).items()
        }
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
    def _format(self) -> dict[str, Operand]:
        return {"bits": self.format.bits, "affine": self.format.is_affine}

    def _place(self, first_row: int, half: Half | None) -> dict[str, Operand]:
        return {
            "panels": self.data,
            "in_features": self.in_features,
            "first_row": first_row,
            "half": HALVES[half],
        }

    def _check(self, in_features: int, dtype: torch.dtype) -> None:
        if not can_quantize(in_features, dtype):
            raise ValueError(f"a weight of {in_features} inputs in {dtype} cannot be quantized")

    def _allocate(self, num_outputs: int) -> Tensor:
        num_groups = num_outputs * self.in_features // GROUP_SIZE
        return zeros_in_huge_pages((num_groups * self.format.group_bytes,), torch.uint8)


def can_quantize(in_features: int, dtype: torch.dtype) -> bool:
    """Return whether this machine has native products for such a weight."""
    return bool(isa()) and dtype in DTYPES and in_features % GROUP_SIZE == 0


def allow_wide_products(weights: Sequence[QuantizedWeight]) -> dict[Kind, int]:
    """Let these weights multiply many rows in bfloat16 where that is faster, as measured within a tenth of a second.

    A recording of products keeps the choice, so call this first.

    Returns:
        Kind of weight -> the smallest number of rows that is faster in bfloat16, for the kinds that have one.
    """
    kinds: dict[Kind, list[QuantizedWeight]] = {}
    for weight in weights:
        kinds.setdefault(_kind(weight), []).append(weight)
    crossovers = {kind: _find_crossover(alike) for kind, alike in kinds.items()}
    for weight in weights:
        weight.wide_rows = crossovers[_kind(weight)]
    return {kind: rows for kind, rows in crossovers.items() if rows != NEVER}


def _kind(weight: QuantizedWeight) -> Kind:
    return weight.out_features, weight.in_features, weight.gated, weight.format


def _find_crossover(alike: Sequence[QuantizedWeight]) -> int:
    """Return the fewest rows of `_CROSSOVER_ROWS` from which on the wide product is faster, or `NEVER`."""
    crossover = NEVER
    for num_rows in reversed(_CROSSOVER_ROWS):
        if measure_s(alike, num_rows, wide=True) > _WORTHWHILE * measure_s(alike, num_rows, wide=False):
            break
        crossover = num_rows
    return crossover


def measure_s(alike: Sequence[QuantizedWeight], num_rows: int, *, wide: bool) -> float:
    """Return the seconds of the fastest of some products.

    Each product takes another weight if there are several, since the caches hold no weight when a step needs it.
    """
    x = torch.ones(num_rows, alike[0].in_features, dtype=torch.bfloat16)
    seconds: list[float] = []
    for weight in cycle(alike):
        weight.wide_rows = 1 if wide else NEVER
        started = time.perf_counter()
        weight.multiply(x, torch.bfloat16, "silu" if weight.gated else None)
        seconds.append(time.perf_counter() - started)
        if len(seconds) == _ROUNDS or sum(seconds) > _ENOUGH_S:
            break
    return min(seconds)
