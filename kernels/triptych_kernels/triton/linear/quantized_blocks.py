"""Groups of quantized weights from GGUF blocks or by rounding, in plain torch, since it runs once, at load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.weights.formats import GROUP_SIZE, QuantizedFormat


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
