"""Low-rank adapters of embeddings: the factors of each token are looked up and then multiplied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.linear.adapters import expand_products
from triptych_kernels.weights.adapters import AdapterRef, StackedTable

_BLOCK = 64  # ranks of one program


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRef) -> Tensor:
    table = adapters.table
    assert isinstance(table, StackedTable), "made for this weight"
    _, rank, num_tokens = table.a.shape
    if len(x):
        factors = torch.empty((len(x), rank), dtype=torch.float32, device=x.device)
        _look_up[(len(x), triton.cdiv(rank, _BLOCK))](
            token_ids,
            adapters.slots,
            table.ranks,
            table.a,
            factors,
            rank,
            num_tokens,
            BLOCK=_BLOCK,
            num_warps=1,
        )
        expand_products(x, factors, table, adapters.slots)
    return x


@triton.jit
def _look_up(token_ids, slots, slot_ranks, a, factors, rank, num_tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    ranks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    if slot >= 0:
        is_rank = ranks < tl.load(slot_ranks + slot)
        token = tl.load(token_ids + row)
        places = (slot * rank + ranks).to(tl.int64) * num_tokens + token
        values = tl.load(a + places, mask=is_rank, other=0.0)
        tl.store(factors + row.to(tl.int64) * rank + ranks, values.to(tl.float32), mask=is_rank)
