"""The gated activation, one pass over its input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # outputs of one program; all rows are read in whole cache lines


def silu_and_mul(gate_up: Tensor) -> Tensor:
    num_outputs = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], num_outputs), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (out.numel() // num_outputs, triton.cdiv(num_outputs, _BLOCK))
        _silu_and_mul[grid](gate_up, out, num_outputs, BLOCK=_BLOCK)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, num_outputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    gate = tl.load(gate_up + row * 2 * num_outputs + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * num_outputs + num_outputs + column, mask=inside).to(tl.float32)
    tl.store(out + row * num_outputs + column, gate * tl.sigmoid(gate) * up, mask=inside)
