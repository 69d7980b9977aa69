"""A linear layer's weight in 4 or 8 bits; quantized.h draws how it is packed."""

from __future__ import annotations

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


_BLOCK_TYPES = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}  # BlockType in quantized_weight.cpp


class QuantizedWeight(PackedWeight, BlockWeight):
    """[out_features, in_features] of one or several projections; products take float32 and bfloat16.

    Products round their inputs to 16-bit integers, group by group, which is finer than bfloat16, and multiply
    integers exactly.
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
        """Storage for a weight, all zero; it belongs to the instruction set in use.

        Args:
            in_features: a multiple of `GROUP_SIZE`.
            dtype: of what is looked up in it unless told otherwise.
            gated: the two halves of `out_features` are an MLP's gate and up, which are multiplied.
        Raises:
            ValueError: a dtype or number of inputs that no kernel is made for.
        """
        self.format = format
        super().__init__(out_features, in_features, dtype, gated=gated, bias=bias)
        self.wide_rows = NEVER
        """So many rows or more are multiplied in bfloat16, with weights rounded to it: faster for very many, and
        their results are not those of fewer rows. Read when a product is called or recorded."""

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(DTYPES)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        """Quantize rows [n, in_features] into output `first_row` and those after it, counted within the half.

        As GGML's reference quantizers round; in the affine 4-bit format each group becomes a Q4_0 or a Q4_1,
        whichever is nearer to it.
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
        launch("quantized_linear", x, **linear, **self._format, wide_rows=self.wide_rows)
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
    """Whether native products exist here for such a weight."""
    return bool(isa()) and dtype in DTYPES and in_features % GROUP_SIZE == 0
