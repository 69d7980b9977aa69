"""A linear layer's weight in 4 or 8 bits on a CUDA device, in groups of 32 inputs.

A unit of the storage holds two groups of 4 bits, or one of 8, of every output, so that a tile of outputs is one piece
of memory and a thread loads 16 bytes of one output:

    4 bits   [pairs of groups, out_features, 8] int32, as pairs of 16 bits, the lower first: pair element i is, from
             its lowest bits, inputs i and i + 16 of the first group, then of the second. A shift and a mask yield two
             operands of 16 bits. If the number of groups is odd, the second of the last unit is never read.
    8 bits   [groups, out_features, 32] int8

Scales, and in affine formats minimums, are separate tensors: [groups, out_features] float16, as GGUF has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.triton.linear.quantized_blocks import Groups, quantize_rows_to_groups, read_blocks
from triptych_kernels.triton.linear.quantized_linear import multiply_groups
from triptych_kernels.triton.linear.quantized_rows import find_rows
from triptych_kernels.weights.base import BlockWeight, Half
from triptych_kernels.weights.formats import BLOCK_FORMATS, GROUP_SIZE, QuantizedFormat

_FILLED_AT_ONCE = 2**24  # weights: quantizing takes about 40 bytes of scratch for each


@dataclass(frozen=True, slots=True, eq=False)
class GroupStorage:
    """The tensors of a weight, or with one more axis in front those of several weights of one shape."""

    integers: Tensor
    scales: Tensor
    minimums: Tensor | None

    @classmethod
    def zeros(cls, *shape: int, format: QuantizedFormat, device: torch.device) -> GroupStorage:
        """Allocate storage for weights [..., out_features, in_features].

        Raises:
            ValueError: The number of inputs is not a multiple of `GROUP_SIZE`.
        """
        *alike, out_features, in_features = shape
        if in_features % GROUP_SIZE:
            raise ValueError(
                f"a weight of {in_features} inputs cannot be quantized; they must be a multiple of {GROUP_SIZE}"
            )
        num_groups = in_features // GROUP_SIZE
        units, elements, dtype = -(-num_groups // 2), 8, torch.int32
        if format.bits == 8:
            units, elements, dtype = num_groups, GROUP_SIZE, torch.int8
        scales = torch.zeros((*alike, num_groups, out_features), dtype=torch.float16, device=device)
        return cls(
            integers=torch.zeros((*alike, units, out_features, elements), dtype=dtype, device=device),
            scales=scales,
            minimums=torch.zeros_like(scales) if format.is_affine else None,
        )

    def __getitem__(self, index: int) -> GroupStorage:
        """Return the storage of one weight among several."""
        minimums = None if self.minimums is None else self.minimums[index]
        return GroupStorage(self.integers[index], self.scales[index], minimums)


class GroupQuantizedWeight(BlockWeight):
    """A weight of one or several projections. Products sum in float32.

    Products round no weight, unless those of many rows are allowed to.
    """

    impl = "triton"

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        format: QuantizedFormat,
        *,
        device: torch.device,
        gated: bool = False,
        bias: bool = False,
        batch_invariant: bool = True,
        storage: GroupStorage | None = None,
    ) -> None:
        """Create a weight of zeros.

        Args:
            in_features: A multiple of `GROUP_SIZE`.
            dtype: Dtype of the inputs.
            batch_invariant: Whether a row has the same bits in any batch. If not, products of many rows may round
                weights to `dtype`, which is faster, and their results differ from those of fewer rows.
            storage: Its part of a storage of several weights; None allocates one.
        Raises:
            ValueError: The number of inputs is not a multiple of `GROUP_SIZE`.
        """
        storage = storage or GroupStorage.zeros(out_features, in_features, format=format, device=device)
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.format = format
        self.device = device
        self.gated = gated
        self.batch_invariant = batch_invariant
        self.integers, self.scales, self.minimums = storage.integers, storage.scales, storage.minimums
        self.bias = torch.zeros(out_features, device=device) if bias else None

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    @property
    def num_bytes(self) -> int:
        parts = (self.integers, self.scales, self.minimums, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def fill_rows(self, first_row: int, rows: Tensor, half: Half | None = None) -> None:
        """Quantize rows [n, in_features] into output `first_row` and those after it, counted within the half.

        Rounding is that of GGML's reference quantizers. In the affine 4-bit format each group becomes a Q4_0 or a
        Q4_1, whichever is nearer to it.
        """
        first = self._first(first_row, half)
        for part in rows.split(max(_FILLED_AT_ONCE // self.in_features, 1)):
            self._store(first, quantize_rows_to_groups(part.to(self.device), self.format))
            first += len(part)

    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        if not self.format.holds(BLOCK_FORMATS[type]):
            raise ValueError(f"{type} blocks do not fit into {self.format}")
        first = self._first(first_row, half)
        for part in data.split(max(_FILLED_AT_ONCE // self.in_features, 1)):
            groups = read_blocks(type, part.to(self.device))
            if type == "Q4_0" and self.format.bits == 8:
                groups = Groups(groups.integers - 8, groups.scales, torch.zeros_like(groups.scales))
            self._store(first, groups)
            first += len(part)

    def fill_bias(self, first_row: int, values: Tensor, half: Half | None = None) -> None:
        assert self.bias is not None, "created without a bias"
        first = self._first(first_row, half)
        self.bias[first : first + len(values)] = values.to(self.device)

    def multiply(self, x: Tensor, out_dtype: torch.dtype, activation: str | None = None) -> Tensor:
        assert self.gated == (activation is not None), "a gated weight is created for the activation"
        return multiply_groups(
            x, self.integers, self.scales, self.minimums, self.bias, out_dtype, activation,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def rows(self, token_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
        return find_rows(token_ids, self.integers, self.scales, self.minimums, out_dtype)

    def _first(self, first_row: int, half: Half | None) -> int:
        return first_row + (self.out_features // 2 if half == "up" else 0)

    def _store(self, first: int, groups: Groups) -> None:
        outputs = slice(first, first + len(groups.scales))
        units = _pair_up(groups.integers) if self.format.bits == 4 else groups.integers
        self.integers[:, outputs] = units.transpose(0, 1).to(self.integers.dtype)
        self.scales[:, outputs] = groups.scales.T
        if self.minimums is not None:
            self.minimums[:, outputs] = groups.minimums.T


def _pair_up(integers: Tensor) -> Tensor:
    """Pack [rows, groups, 32] of 4 bits into [rows, pairs of groups, 8] int32."""
    if integers.shape[1] % 2:
        integers = torch.cat([integers, torch.zeros_like(integers[:, :1])], dim=1)
    nibbles = integers.int().view(
        len(integers), -1, 4, 16
    )  # the halves of the first group, then of the second
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=integers.device)
    return (nibbles << shifts[:, None]).sum(2).to(torch.int16).view(torch.int32)
