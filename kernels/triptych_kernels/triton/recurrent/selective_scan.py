"""The state space of Mamba 1: some channels of a row in each program, token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_kernels.triton.recurrent.scan_heads import softplus

_STATE_ELEMENTS = 1024  # of one program: 16 registers for each thread of two warps


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    batch.require_no_guesses("triton")
    size, channels = rates.shape
    size_block = triton.next_power_of_2(size)
    channels_block = min(max(_STATE_ELEMENTS // size_block, 1), triton.next_power_of_2(channels))
    _selective_scan[(len(batch.read_pages), triton.cdiv(channels, channels_block))](
        x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0), rates, skip,
        out, state, state.stride(0), batch.read_pages, batch.write_pages, batch.query_starts,
        SIZE=size, CHANNELS=channels, SIZE_BLOCK=size_block, CHANNELS_BLOCK=channels_block, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _selective_scan(
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, rates, skip,
    out, state, state_stride, read_pages, write_pages, query_starts,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS_BLOCK + tl.arange(0, CHANNELS_BLOCK)
    elements = tl.arange(0, SIZE_BLOCK)
    is_channel, is_element = channels < CHANNELS, elements < SIZE
    places = elements[:, None] * CHANNELS + channels[None, :]
    inside = is_element[:, None] & is_channel[None, :]
    read, write = tl.load(read_pages + row).to(tl.int64), tl.load(write_pages + row).to(tl.int64)
    own = tl.load(state + read * state_stride + places, mask=inside & (read != 0), other=0.0)
    rate = tl.load(rates + places, mask=inside, other=0.0)
    factor = tl.load(skip + channels, mask=is_channel, other=0.0)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    first = start.to(tl.int64)
    x += first * x_stride + channels
    dt += first * dt_stride + channels
    b += first * b_stride + elements
    c += first * c_stride + elements
    out += first * CHANNELS + channels
    for _ in range(start, end):
        value = tl.load(x, mask=is_channel, other=0.0).to(tl.float32)
        size = softplus(tl.load(dt, mask=is_channel, other=0.0).to(tl.float32))
        enter = tl.load(b, mask=is_element, other=0.0).to(tl.float32)
        leave = tl.load(c, mask=is_element, other=0.0).to(tl.float32)
        own = own * tl.exp(-rate * size[None, :]) + enter[:, None] * (size * value)[None, :]
        result = tl.sum(leave[:, None] * own, axis=0) + factor * value
        tl.store(out, result.to(out.dtype.element_ty), mask=is_channel)
        x += x_stride
        dt += dt_stride
        b += b_stride
        c += c_stride
        out += CHANNELS
    tl.store(state + write * state_stride + places, own, mask=inside & (write != 0))
