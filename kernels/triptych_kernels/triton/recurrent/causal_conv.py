"""Causal convolution over the tokens of each row, in two launches: the results, then the states.

The first launch reads the states of before the step, the second replaces them, so that a page can be both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch

_TOKENS, _CHANNELS = 16, 128  # of one program: 16 elements for each thread of four warps


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    batch: StateBatch,
    *,
    activation: str | None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, channels = x.shape
    batch.require_no_guesses("triton")
    num_rows, taps = len(batch.read_pages), len(weight)
    if not out.numel():
        return out
    channel_blocks = triton.cdiv(channels, _CHANNELS)
    _convolve[(triton.cdiv(num_tokens, _TOKENS), channel_blocks)](
        x, x.stride(0), weight, bias, out, state, state.stride(0), batch.read_pages, batch.query_starts,
        num_tokens, num_rows,
        CHANNELS=channels, TAPS=taps, HAS_SILU=activation == "silu",
        ROWS_BLOCK=triton.next_power_of_2(num_rows), TOKENS=_TOKENS, CHANNELS_BLOCK=_CHANNELS,
    )  # fmt: skip
    _keep_inputs[(num_rows, channel_blocks)](
        x, x.stride(0), state, state.stride(0), batch.read_pages, batch.write_pages, batch.query_starts,
        CHANNELS=channels, PAST=taps - 1, PAST_BLOCK=triton.next_power_of_2(taps - 1), CHANNELS_BLOCK=_CHANNELS,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(
    x, x_stride, weight, bias, out, state, state_stride, read_pages, query_starts, num_tokens, num_rows,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_SILU: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = (tl.program_id(1) * CHANNELS_BLOCK + tl.arange(0, CHANNELS_BLOCK))[None, :]
    is_token = tokens < num_tokens
    inside = channels < CHANNELS
    # the row of a token is the number of rows that end before it
    rows = tl.arange(0, ROWS_BLOCK)
    ends = tl.load(query_starts + 1 + rows, mask=rows < num_rows, other=2147483647)
    row = tl.minimum(tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), axis=1), num_rows - 1)
    start = tl.load(query_starts + row)
    page = tl.load(read_pages + row).to(tl.int64)
    total = tl.zeros((TOKENS, CHANNELS_BLOCK), tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        seen = tokens - (TAPS - 1) + tap
        is_new = (seen >= start)[:, None]
        new = tl.load(
            x + seen[:, None].to(tl.int64) * x_stride + channels,
            mask=is_new & is_token[:, None] & inside,
            other=0.0,
        )
        # an input before the row's first token: of the state's TAPS - 1
        old = tl.load(
            state + (page * state_stride + (seen - start + TAPS - 1) * CHANNELS)[:, None] + channels,
            mask=(is_token & (page != 0))[:, None] & (seen < start)[:, None] & inside,
            other=0.0,
        )
        factor = tl.load(weight + tap * CHANNELS + channels, mask=inside, other=0.0)
        total += factor * tl.where(is_new, new.to(tl.float32), old)
    if HAS_SILU:
        total = total * tl.sigmoid(total)
    places = out + tokens[:, None].to(tl.int64) * CHANNELS + channels
    tl.store(places, total.to(out.dtype.element_ty), mask=is_token[:, None] & inside)


@triton.jit
def _keep_inputs(
    x, x_stride, state, state_stride, read_pages, write_pages, query_starts,
    CHANNELS: tl.constexpr, PAST: tl.constexpr, PAST_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channels = (tl.program_id(1) * CHANNELS_BLOCK + tl.arange(0, CHANNELS_BLOCK))[None, :]
    taps = tl.arange(0, PAST_BLOCK)[:, None]
    inside = (taps < PAST) & (channels < CHANNELS)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    read, write = tl.load(read_pages + row).to(tl.int64), tl.load(write_pages + row).to(tl.int64)
    tokens = end - PAST + taps
    is_new = tokens >= start
    new = tl.load(x + tokens.to(tl.int64) * x_stride + channels, mask=inside & is_new, other=0.0)
    old = tl.load(
        state + read * state_stride + (taps + end - start) * CHANNELS + channels,
        mask=inside & (tokens < start) & (read != 0),
        other=0.0,
    )
    kept = tl.where(is_new, new.to(tl.float32), old)
    tl.debug_barrier()  # all of the page is read before any of it is written
    tl.store(state + write * state_stride + taps * CHANNELS + channels, kept, mask=inside & (write != 0))
