"""Rounding of rows to 8 bits with one scale each, as for the inputs of `w8a8_linear` before the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.triton.attention.write_kv import largest_finite, quantize, scales_of

LONGEST_WHOLE_ROW = (
    32768  # elements that the 512 threads of a program hold in registers; longer rows are read twice
)
_ELEMENTS_PER_THREAD = 16  # two loads of 16 bytes in bfloat16
_MAX_WARPS = 16


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Write each row as `scale * element`, by the rule of `kv_scales`: a row that is not finite has scale NaN.

    Args:
        x: [num_rows, length], the last axis contiguous.
        dtype: int8 or float8_e4m3fn.
    Returns:
        Elements [num_rows, length], and scales [num_rows] float32.
    """
    num_rows, length = x.shape
    elements = torch.empty((num_rows, length), dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(length), LONGEST_WHOLE_ROW)
        _quantize_rows[(num_rows,)](
            x, x.stride(0), elements, scales, length,
            LARGEST_ELEMENT=LARGEST_ELEMENT[dtype], IS_WHOLE=length <= block, BLOCK=block,
            num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS),
        )  # fmt: skip
    return elements, scales


@triton.jit
def _quantize_rows(
    x, x_stride, elements, scales, length,
    LARGEST_ELEMENT: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    first = x + row * x_stride + column
    stored = elements + row * length + column
    if IS_WHOLE:
        inside = column < length
        values = tl.load(first, mask=inside, other=0.0)
        scale = scales_of(largest_finite(values), LARGEST_ELEMENT)
        tl.store(stored, quantize(values, scale, LARGEST_ELEMENT).to(elements.dtype.element_ty), mask=inside)
    else:
        largest = tl.zeros([1, 1], tl.float32)
        for start in range(0, length, BLOCK):
            values = tl.load(first + start, mask=start + column < length, other=0.0)
            largest = tl.maximum(largest, largest_finite(values))
        scale = scales_of(largest, LARGEST_ELEMENT)
        for start in range(0, length, BLOCK):
            inside = start + column < length
            values = quantize(tl.load(first + start, mask=inside, other=0.0), scale, LARGEST_ELEMENT)
            tl.store(stored + start, values.to(elements.dtype.element_ty), mask=inside)
    tl.store(scales + row + tl.zeros([1, 1], tl.int32), scale)
