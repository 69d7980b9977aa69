"""Sums that low-rank adapters add to a product: two small products for each row, with the factors of its slot.

    shrink   products [num_rows, rank]  =  x A'      one program for 16 rows and a block of ranks
    expand   out                       +=  products B one program for 16 rows and a block of outputs

A program goes over the slots and passes those that none of its rows has, and ranks that a slot's adapter does not have.
So time grows with the adapters of a step, and hardly with the slots; where no row has an adapter, a program reads 16
slots and ends. No shape depends on the rows, so a graph may be recorded. A row's bits depend on its slot only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.weights.adapters import AdapterRef, StackedTable

_BLOCK_M = 16  # rows of a tile: what the tensor cores take at least
_BLOCK_R = 16
_BLOCK_K = 128
_BLOCK_N = 64


def add_adapters(out: Tensor, x: Tensor, adapters: AdapterRef) -> None:
    """Add to each row of a product what the row's adapter does, summed in float32. Other rows stay as they are.

    Args:
        out: [num_rows, out_features], contiguous; the sum is rounded to its dtype.
        x: [num_rows, in_features], the last axis contiguous.
        adapters: With a `StackedTable`.
    """
    table = adapters.table
    assert isinstance(table, StackedTable), "made for this weight"
    num_slots, rank, in_features = table.a.shape
    num_rows = len(x)
    if not num_rows:
        return
    products = torch.empty((num_rows, rank), dtype=torch.float32, device=x.device)
    _shrink[(triton.cdiv(num_rows, _BLOCK_M), triton.cdiv(rank, _BLOCK_R))](
        x, x.stride(0), adapters.slots, table.ranks, table.a, products, num_rows, num_slots, rank, in_features,
        BLOCK_M=_BLOCK_M, BLOCK_R=_BLOCK_R, BLOCK_K=_BLOCK_K, num_warps=2,
    )  # fmt: skip
    expand_products(out, products, table, adapters.slots)


def expand_products(out: Tensor, products: Tensor, table: StackedTable, slots: Tensor) -> None:
    """Add to each row of `out` what its products with A give; those beyond the rank of its adapter are not read.

    Args:
        out: As of `add_adapters`, at least one row.
        products: [num_rows, rank] float32.
        slots: [num_rows] int32, -1 for none.
    """
    num_slots, rank, out_features = table.b.shape
    num_rows = len(out)
    _expand[(triton.cdiv(num_rows, _BLOCK_M), triton.cdiv(out_features, _BLOCK_N))](
        products, slots, table.ranks, table.b, out, num_rows, num_slots, rank, out_features,
        BLOCK_M=_BLOCK_M, BLOCK_R=_BLOCK_R, BLOCK_N=_BLOCK_N, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _shrink(
    x, x_stride, slots, slot_ranks, a, products, num_rows, num_slots, rank, in_features,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_rank = tl.program_id(1) * BLOCK_R
    ranks = first_rank + tl.arange(0, BLOCK_R)
    inputs = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_rank = ranks < rank
    own_slots = tl.load(slots + rows, mask=is_row, other=-1)
    if tl.max(own_slots, axis=0) >= 0:
        right = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for slot in range(num_slots):
            is_own = own_slots == slot
            is_used = tl.max(is_own.to(tl.int32), axis=0) > 0
            if is_used & (first_rank < tl.load(slot_ranks + slot)):
                left = a + (slot * rank + ranks).to(tl.int64)[None, :] * in_features + inputs[:, None]
                for start in range(0, in_features, BLOCK_K):
                    is_input = start + inputs < in_features
                    factors = tl.load(left + start, mask=is_input[:, None] & is_rank[None, :], other=0.0)
                    values = tl.load(right + start, mask=is_own[:, None] & is_input[None, :], other=0.0)
                    total = tl.dot(values.to(factors.dtype), factors, total, input_precision="ieee")
        places = products + rows.to(tl.int64)[:, None] * rank + ranks[None, :]
        tl.store(places, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    products, slots, slot_ranks, b, out, num_rows, num_slots, rank, out_features,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    is_output = outputs < out_features
    own_slots = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    if tl.max(own_slots, axis=0) >= 0:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for slot in range(num_slots):
            is_own = own_slots == slot
            if tl.max(is_own.to(tl.int32), axis=0) > 0:
                num_ranks = tl.load(slot_ranks + slot)
                for start in range(0, num_ranks, BLOCK_R):
                    own_ranks = start + ranks
                    is_rank = own_ranks < num_ranks
                    factors = tl.load(
                        b + (slot * rank + own_ranks).to(tl.int64)[:, None] * out_features + outputs[None, :],
                        mask=is_rank[:, None] & is_output[None, :],
                        other=0.0,
                    )
                    values = tl.load(
                        products + rows.to(tl.int64)[:, None] * rank + own_ranks[None, :],
                        mask=is_own[:, None] & is_rank[None, :],
                        other=0.0,
                    )
                    total = tl.dot(values.to(factors.dtype), factors, total, input_precision="ieee")
        places = out + rows.to(tl.int64)[:, None] * out_features + outputs[None, :]
        is_changed = (own_slots >= 0)[:, None] & is_output[None, :]
        before = tl.load(places, mask=is_changed, other=0.0).to(tl.float32)
        tl.store(places, (before + total).to(out.dtype.element_ty), mask=is_changed)
