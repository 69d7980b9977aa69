"""Rows of a weight of 4 or 8 bits, looked up by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.weights.formats import GROUP_SIZE

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
