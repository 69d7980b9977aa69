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
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.linear.quantized_linear import multiply_groups
from triptych_kernels.weights.base import BlockWeight, Half
from triptych_kernels.weights.formats import BLOCK_FORMATS, GROUP_SIZE, QuantizedFormat

FILLED_AT_ONCE = 2**24  # weights: quantizing takes about 40 bytes of scratch for each


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
        for part in rows.split(max(FILLED_AT_ONCE // self.in_features, 1)):
            self._store(first, quantize_rows_to_groups(part.to(self.device), self.format))
            first += len(part)

    def fill_blocks(self, first_row: int, type: str, data: Tensor, half: Half | None = None) -> None:
        if not self.format.holds(BLOCK_FORMATS[type]):
            raise ValueError(f"{type} blocks do not fit into {self.format}")
        first = self._first(first_row, half)
        for part in data.split(max(FILLED_AT_ONCE // self.in_features, 1)):
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
        gated = self.gated and activation is not None
        return multiply_groups(
            x, self.integers, self.scales, self.minimums, self.bias, out_dtype, activation,
            gated=gated, batch_invariant=self.batch_invariant,
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


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of weights, each `scale * integer + minimum`."""

    integers: Tensor
    """[rows, groups, GROUP_SIZE] int16: 0 to 15 for 4 bits, -128 to 127 for 8."""
    scales: Tensor
    """[rows, groups] float16."""
    minimums: Tensor
    """[rows, groups] float16."""


def read_blocks(type: str, data: Tensor) -> Groups:
    """Convert GGUF blocks to groups; a Q4_0's integers stay as stored, so its minimum is -8 scales.

    Args:
        type: Q4_0, Q4_1 or Q8_0.
        data: [rows, bytes of a row] uint8.
    Source: the block structures of ggml-common.h in llama.cpp.
    """
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type]
    blocks = data.reshape(len(data), -1, block_bytes)
    scales = _half(blocks[..., :2])
    if type == "Q8_0":
        return Groups(blocks[..., 2:].contiguous().view(torch.int8).short(), scales, torch.zeros_like(scales))
    minimums = _half(blocks[..., 2:4]) if type == "Q4_1" else scales * -8
    nibbles = blocks[..., -GROUP_SIZE // 2 :].short()
    return Groups(torch.cat([nibbles & 15, nibbles >> 4], dim=-1), scales, minimums)


def quantize_rows_to_groups(rows: Tensor, format: QuantizedFormat) -> Groups:
    """Round rows [n, in_features] as GGML's reference quantizers do (quantize_row_*_ref in ggml-quants.c).

    In the affine 4-bit format each group becomes a Q4_0 or a Q4_1, whichever is nearer to it.
    """
    x = rows.float().unflatten(1, (-1, GROUP_SIZE))
    if format.bits == 8:
        return _quantize_q8_0(x)
    symmetric = _quantize_q4_0(x)
    if not format.is_affine:
        return symmetric
    affine = _quantize_q4_1(x)
    is_nearer = _squared_error(affine, x) < _squared_error(symmetric, x)
    return Groups(
        torch.where(is_nearer[..., None], affine.integers, symmetric.integers),
        torch.where(is_nearer, affine.scales, symmetric.scales),
        torch.where(is_nearer, affine.minimums, symmetric.minimums),
    )


def _half(pair: Tensor) -> Tensor:
    return pair.contiguous().view(torch.float16).squeeze(-1)


def _quantize_q4_0(x: Tensor) -> Groups:
    scales = _extreme(x) / -8
    half_scales = scales.half()
    return Groups(_to_nibbles(x, scales, 8.5), half_scales, half_scales * -8)


def _quantize_q4_1(x: Tensor) -> Groups:
    low = x.amin(-1)
    scales = _quotient(x.amax(-1) - low, 15.0)
    return Groups(_to_nibbles(x - low[..., None], scales, 0.5), scales.half(), low.half())


def _quantize_q8_0(x: Tensor) -> Groups:
    scales = _quotient(x.abs().amax(-1), 127.0)
    values = x * _inverse(scales)[..., None]
    # just below one half, so that what is just below it does not become a whole in the sum
    integers = (values + torch.full_like(values, 0.49999997).copysign(values)).trunc()
    return Groups(integers.short(), scales.half(), torch.zeros_like(scales.half()))


def _quotient(x: Tensor, divisor: float) -> Tensor:
    """Divide, rounded once: on GPUs torch would multiply with the reciprocal of a plain number."""
    return x / torch.full((), divisor, device=x.device)


def _extreme(x: Tensor) -> Tensor:
    """Return the first element of the largest magnitude in each group, with its sign."""
    sizes = x.abs()
    places = torch.arange(GROUP_SIZE, device=x.device)
    first = torch.where(sizes == sizes.amax(-1, keepdim=True), places, GROUP_SIZE - 1).amin(-1, keepdim=True)
    return x.gather(-1, first).squeeze(-1)


def _to_nibbles(x: Tensor, scales: Tensor, bias: float) -> Tensor:
    # GGML's compilers contract this to a fused multiply-add, rounded once
    values = (x.double() * _inverse(scales)[..., None].double() + bias).float()
    return values.clamp(0, 15).short()


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _squared_error(groups: Groups, x: Tensor) -> Tensor:
    scales, minimums = groups.scales.float()[..., None], groups.minimums.float()[..., None]
    return (groups.integers * scales + minimums - x).square().sum(-1)


_GROUPS = 32  # of one program: 1,024 elements


def find_rows(
    token_ids: Tensor, integers: Tensor, scales: Tensor, minimums: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Compute `ops.embedding` of a weight stored as `quantized_weight` describes; each element is rounded once."""
    num_groups, out_features = scales.shape
    out = torch.empty((len(token_ids), num_groups * GROUP_SIZE), dtype=out_dtype, device=token_ids.device)
    if out.numel():
        _find_rows[(len(token_ids), triton.cdiv(num_groups, _GROUPS))](
            token_ids, integers, scales, minimums, out, num_groups, out_features,
            BITS=4 if integers.dtype == torch.int32 else 8, GROUPS=_GROUPS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _find_rows(
    token_ids, integers, scales, minimums, out, num_groups, out_features, BITS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < num_groups
    token = tl.load(token_ids + row).to(tl.int64)
    column = tl.arange(0, 32)[None, :]
    inside = is_group[:, None]
    if BITS == 4:
        places = ((group // 2).to(tl.int64) * out_features + token) * 8
        words = tl.load(integers + places[:, None] + column % 16 // 2, mask=inside, other=0)
        shifts = column % 2 * 16 + (group % 2 * 8)[:, None] + column // 16 * 4
        bits = (words >> shifts) & 15
        numbers = bits.to(tl.float32)
        if minimums is None:
            numbers -= 8.0
    else:
        places = (group.to(tl.int64) * out_features + token) * 32
        numbers = tl.load(integers + places[:, None] + column, mask=inside, other=0).to(tl.float32)
    place = group.to(tl.int64) * out_features + token
    values = numbers * tl.load(scales + place, mask=is_group, other=0.0).to(tl.float32)[:, None]
    if minimums is not None:
        values += tl.load(minimums + place, mask=is_group, other=0.0).to(tl.float32)[:, None]
    address = out + row * num_groups * 32 + group[:, None] * 32 + column
    tl.store(address, values.to(out.dtype.element_ty), mask=inside)
