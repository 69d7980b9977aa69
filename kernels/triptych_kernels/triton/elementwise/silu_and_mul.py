"""Activations, and the gated ones as one pass over their input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # outputs of one program: its 128 threads each load 16 bytes of gate and 16 of up in bfloat16


def silu_and_mul(x: Tensor) -> Tensor:
    return gate_and_mul(x, "silu")


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Compute a gated activation in float32, and round once.

    Args:
        gate_up: [..., 2 * intermediate_size], gate first.
        activation: One of `ops.linear.GATED_ACTIVATIONS`.
    Returns:
        [..., intermediate_size], a new tensor.
    """
    num_outputs = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], num_outputs), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (out.numel() // num_outputs, triton.cdiv(num_outputs, _BLOCK))
        _gate_and_mul[grid](gate_up, out, num_outputs, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gate_and_mul(gate_up, out, num_outputs, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    gate = tl.load(gate_up + row * 2 * num_outputs + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * num_outputs + num_outputs + column, mask=inside).to(tl.float32)
    tl.store(out + row * num_outputs + column, activate_gated(gate, up, ACTIVATION), mask=inside)


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr):
    """Apply one of `ops.linear.GATED_ACTIVATIONS` in float32."""
    if ACTIVATION == "swiglu_oai":
        # comparisons instead of minimums, so that NaN stays
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        activated = activate(gate, "quick_gelu") * (up + 1.0)
    else:
        activated = activate(gate, ACTIVATION) * up
    return activated


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply one of `ops.linear.ACTIVATIONS` in float32."""
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x *= 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        x *= x
    elif ACTIVATION == "quick_gelu":
        x *= tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # sqrt(2 / pi); `fma` in words, so that no compiler decides it: different kernels shall give the same bits
        inner = 0.7978845608028654 * tl.fma(0.044715 * x * x, x, x)
        x *= tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
    return x
