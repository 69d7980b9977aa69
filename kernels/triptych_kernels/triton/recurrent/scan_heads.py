"""The scan that the gated delta rule and the state space of Mamba 2 have in common: a matrix for each head.

A program holds some columns of one head's state in registers and takes the row's tokens one after the other, so a state
has the same bits however tokens are cut into steps. Prompts would be faster in chunks, as products of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch

_STATE_ELEMENTS = 4096  # of one program: 32 registers for each thread of four warps


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The operands of a head, under the names of the gated delta rule; `ops.recurrent` has their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor
    rates: Tensor
    step_bias: Tensor
    beta: Tensor | None = None
    beta_scale: float = 1.0
    skip: Tensor | None = None
    limits: tuple[float, float] = (0.0, float("inf"))


def scan_heads(heads: Heads, state: Tensor, batch: StateBatch) -> Tensor:
    """Return what the heads give for all tokens, a new tensor like the values."""
    value, key, query = heads.value, heads.key, heads.query
    batch.require_no_guesses("triton")
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if not out.numel():
        return out
    num_heads, value_dim = value.shape[1:]
    keys_block = triton.next_power_of_2(key.shape[2])
    columns = min(max(_STATE_ELEMENTS // keys_block, 1), triton.next_power_of_2(value_dim))
    _scan_heads[(len(batch.read_pages), num_heads, triton.cdiv(value_dim, columns))](
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
        value, value.stride(0), value.stride(1), heads.step, heads.step.stride(0), heads.rates, heads.step_bias,
        heads.beta, 0 if heads.beta is None else heads.beta.stride(0), heads.beta_scale, heads.skip, *heads.limits,
        out, state, state.stride(0), batch.read_pages, batch.write_pages, batch.query_starts,
        NUM_HEADS=num_heads, HEADS_PER_KEY=num_heads // key.shape[1], KEY_DIM=key.shape[2], VALUE_DIM=value_dim,
        KEYS_BLOCK=keys_block, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def softplus(x):
    """Return log(1 + e^x) of float32, exact to rounding for small results, too."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    near = tl.where(total == 1.0, power, tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def _scan_heads(
    query, query_stride_0, query_stride_1, key, key_stride_0, key_stride_1,
    value, value_stride_0, value_stride_1, step, step_stride, rates, step_bias,
    beta, beta_stride, beta_scale, skip, least, most,
    out, state, state_stride, read_pages, write_pages, query_starts,
    NUM_HEADS: tl.constexpr, HEADS_PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, KEYS_BLOCK)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
    places = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + columns[None, :]
    inside = is_key[:, None] & is_column[None, :]
    read, write = tl.load(read_pages + row).to(tl.int64), tl.load(write_pages + row).to(tl.int64)
    own = tl.load(state + read * state_stride + places, mask=inside & (read != 0), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(step_bias + head)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    first = start.to(tl.int64)
    key += first * key_stride_0 + head // HEADS_PER_KEY * key_stride_1 + keys
    query += first * query_stride_0 + head // HEADS_PER_KEY * query_stride_1 + keys
    value += first * value_stride_0 + head * value_stride_1 + columns
    step += first * step_stride + head
    if beta is not None:
        beta += first * beta_stride + head
    out += (first * NUM_HEADS + head) * VALUE_DIM + columns
    for _ in range(start, end):
        k = tl.load(key, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(query, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(value, mask=is_column, other=0.0).to(tl.float32)
        size = tl.minimum(tl.maximum(softplus(tl.load(step).to(tl.float32) + bias), least), most)
        own *= tl.exp(-rate * size)
        if beta is not None:
            k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
            q *= tl.rsqrt((tl.sum(q * q) + 1e-6) * KEY_DIM)
            part = beta_scale * tl.sigmoid(tl.load(beta).to(tl.float32))
            entering = part * (v - tl.sum(k[:, None] * own, axis=0))
            beta += beta_stride
        else:
            entering = size * v
        own += k[:, None] * entering[None, :]
        result = tl.sum(q[:, None] * own, axis=0)
        if skip is not None:
            result += tl.load(skip + head) * v
        tl.store(out, result.to(out.dtype.element_ty), mask=is_column)
        key += key_stride_0
        query += query_stride_0
        value += value_stride_0
        step += step_stride
        out += NUM_HEADS * VALUE_DIM
    tl.store(state + write * state_stride + places, own, mask=inside & (write != 0))
