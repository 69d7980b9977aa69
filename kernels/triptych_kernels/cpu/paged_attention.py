"""Paged attention on CPUs: single queries natively, chunks of queries as plain torch computes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from triptych_kernels.cpu.library import DTYPES, isa, load
from triptych_kernels.torch.paged_attention import Chunk, attend_chunk
from triptych_kernels.torch.paged_attention import paged_attention as torch_paged_attention

_SPAN = 256  # kSpan in decode_attention.cpp
_MAX_HEAD_DIM = 256  # the room on its stack
_FLOATS_BESIDE_VALUES = 2  # of a partial result: its maximum and its sum


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How a step's rows are computed; the same for every layer."""

    rows: Tensor
    """[num_decodes] int32, rows of one query."""
    tokens: Tensor
    """[num_decodes] int32, each one's query."""
    num_spans: int
    chunks: tuple[Chunk, ...]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    """What no kernel is made for (wider heads, a float16 cache) is plain torch's."""
    if query.shape[2] > _MAX_HEAD_DIM or kv_cache.dtype not in DTYPES:
        return torch_paged_attention(
            query, kv_cache, block_tables, query_starts, seq_lens, scale,
            query_lens_list=query_lens_list, seq_lens_list=seq_lens_list,
        )  # fmt: skip
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    plan = _plan(query_lens_list, seq_lens_list)
    query, block_tables, seq_lens = query.contiguous(), block_tables.contiguous(), seq_lens.contiguous()
    out = torch.empty_like(query)
    if len(plan.rows):
        scratch = torch.empty(plan.num_spans * num_heads * (head_dim + _FLOATS_BESIDE_VALUES))
        _native(isa(), DTYPES[query.dtype], DTYPES[kv_cache.dtype])(
            query.data_ptr(), kv_cache.data_ptr(), block_tables.data_ptr(), plan.rows.data_ptr(),
            plan.tokens.data_ptr(), seq_lens.data_ptr(), len(plan.rows), num_heads, num_kv_heads, head_dim,
            block_size, block_tables.shape[1], scale, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
    if plan.chunks:
        shape = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        for chunk in plan.chunks:
            attend_chunk(chunk, query.view(shape), kv_cache, block_tables, scale, out.view(shape))
    return out


@cache
def _native(isa: str, query: str, kv_cache: str) -> ctypes._NamedFuncPointer:
    function = getattr(load(isa), f"triptych_decode_attention_{query}_{kv_cache}")
    pointers, sizes = [ctypes.c_void_p] * 6, [ctypes.c_int64] * 6
    function.argtypes = [*pointers, *sizes, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


@lru_cache(maxsize=2)  # every layer of a step asks the same
def _plan(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> _Plan:
    rows: list[int] = []
    tokens: list[int] = []
    chunks: list[Chunk] = []
    num_spans = token = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 1:
            rows.append(row)
            tokens.append(token)
            num_spans += -(-seq_len // _SPAN)
        else:
            chunks.append(Chunk(row, token, query_len, seq_len))
        token += query_len
    return _Plan(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        num_spans,
        tuple(chunks),
    )
