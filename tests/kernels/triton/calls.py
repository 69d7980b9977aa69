"""Calls of the ops as models make them: what `test_compiles` compiles for Hopper, kernel by kernel.

One line per call. Operands are on the meta device, so a launcher that waits for the device, by `.item()` or a shape
read from a tensor, fails here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych_kernels.columns import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.ops import (
    copy_blocks,
    embedding,
    gated_linear,
    paged_attention,
    process_logits,
    rms_norm,
    rotary_and_write_kv,
    rotary_embedding,
    sample,
    silu_and_mul,
    token_logprobs,
    write_kv,
)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _float32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _int64(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _rms_norm(hidden_size: int, *, residual: bool) -> object:
    x, weight = _meta(256, hidden_size), _meta(hidden_size)
    if residual:
        return rms_norm(x, weight, 1e-5, _float32(256, hidden_size), impl="triton")
    return rms_norm(x, weight, 1e-5, impl="triton")


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 256 tokens, views of the packed projection."""
    packed = _meta(256, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return query, key, value


def _rotary_embedding(num_heads: int, num_kv_heads: int, head_dim: int) -> object:
    query, key, _ = _heads(num_heads, num_kv_heads, head_dim)
    return rotary_embedding(query, key, _int64(256), _float32(8192, head_dim), impl="triton")


def _cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A paged cache of bfloat16 or 8 bits with its scales."""
    kv_cache = _meta(64, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    return kv_cache, None if dtype == torch.bfloat16 else _float32(*kv_cache.shape[:4])


def _write_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    _, key, value = _heads(4 * num_kv_heads, num_kv_heads, head_dim)
    kv_cache, kv_scales = _cache(num_kv_heads, head_dim, dtype)
    write_kv(key, value, kv_cache, _int64(256), kv_scales=kv_scales, impl="triton")


def _rotary_and_write_kv(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> object:
    heads = _heads(num_heads, num_kv_heads, head_dim)
    kv_cache, kv_scales = _cache(num_kv_heads, head_dim, dtype)
    operands = *heads, _int64(256), _float32(8192, head_dim), kv_cache, _int64(256)
    return rotary_and_write_kv(*operands, kv_scales=kv_scales, impl="triton")


def _paged_attention(
    query_lens: tuple[int, ...],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 4,
    window: int = 0,
    soft_cap: float = 0.0,
) -> object:
    """Queries, views of the packed projection, and sequences of 8,192 keys."""
    num_rows, num_heads = len(query_lens), group * num_kv_heads
    query = _meta(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    kv_cache, kv_scales = _cache(num_kv_heads, head_dim, dtype)
    return paged_attention(
        query,
        kv_cache,
        _meta(num_rows, 512, dtype=torch.int32),
        _meta(num_rows + 1, dtype=torch.int32),
        _meta(num_rows, dtype=torch.int32),
        head_dim**-0.5,
        kv_scales=kv_scales,
        window=window,
        soft_cap=soft_cap,
        query_lens_list=query_lens,
        seq_lens_list=(8192,) * num_rows,
        impl="triton",
    )


_MIXED = (1,) * 64 + (700,)

def _sample(num_rows: int, vocab_size: int) -> Tensor:
    return sample(
        _float32(num_rows, vocab_size),
        temperature=_float32(num_rows),
        top_k=_meta(num_rows, dtype=torch.int32),
        top_p=_float32(num_rows),
        min_p=_float32(num_rows),
        seeds=_int64(num_rows),
        positions=_int64(num_rows),
        impl="triton",
    )


def _process_logits(num_rows: int, vocab_size: int, num_entries: int) -> Tensor:
    entries = _int64(num_entries), _int64(num_entries)
    return process_logits(
        _float32(256, vocab_size),
        _int64(num_rows),
        allowed=TokenColumns(*entries),
        banned=TokenColumns(*entries),
        biases=BiasColumns(*entries, _float32(num_entries)),
        penalties=PenaltyColumns(
            *entries, _int64(num_entries), _float32(num_rows), _float32(num_rows), _float32(num_rows)
        ),
        impl="triton",
    )


def _token_logprobs(num_rows: int, vocab_size: int, num_top: int) -> object:
    return token_logprobs(
        _float32(256, vocab_size), _int64(num_rows), _int64(num_rows), num_top, impl="triton"
    )


CALLS: dict[str, Callable[[], object]] = {
    "copy_blocks, bfloat16": lambda: copy_blocks(
        _cache(8, 128, torch.bfloat16)[0], _int64(7, 2), impl="triton"
    ),
    "copy_blocks, int8": lambda: copy_blocks(_cache(8, 128, torch.int8)[0], _int64(7, 2), impl="triton"),
    "embedding, widened": lambda: embedding(
        _int64(256), _meta(128256, 4096), out_dtype=torch.float32, impl="triton"
    ),
    "gated_linear, silu": lambda: gated_linear(_meta(256, 4096), _meta(28672, 4096), impl="triton"),
    "gated_linear, gelu": lambda: gated_linear(
        _meta(256, 2304), _meta(18432, 2304), activation="gelu_pytorch_tanh", impl="triton"
    ),
    "paged_attention, heads of 64": lambda: _paged_attention(_MIXED, 3, 64, group=3),
    "paged_attention, heads of 80": lambda: _paged_attention(_MIXED, 32, 80, group=1),
    "paged_attention, heads of 96": lambda: _paged_attention(_MIXED, 8, 96),
    "paged_attention, heads of 128": lambda: _paged_attention(_MIXED, 8, 128),
    "paged_attention, heads of 256, window and cap": lambda: _paged_attention(
        _MIXED, 4, 256, group=2, window=4096, soft_cap=50.0
    ),
    "paged_attention, int8": lambda: _paged_attention(_MIXED, 8, 128, torch.int8),
    "paged_attention, float8, heads of 256, window and cap": lambda: _paged_attention(
        _MIXED, 4, 256, torch.float8_e4m3fn, group=2, window=4096, soft_cap=50.0
    ),
    "process_logits, 128256": lambda: _process_logits(256, 128256, 4000),
    "process_logits, one entry each": lambda: _process_logits(1, 49152, 1),
    "rms_norm, 576": lambda: _rms_norm(576, residual=True),
    "rms_norm, 4096 alone": lambda: _rms_norm(4096, residual=False),
    "rms_norm, 4096": lambda: _rms_norm(4096, residual=True),
    "rms_norm, 8192": lambda: _rms_norm(8192, residual=True),
    "rms_norm, 16384": lambda: _rms_norm(16384, residual=True),
    "rotary_and_write_kv, heads of 64": lambda: _rotary_and_write_kv(9, 3, 64),
    "rotary_and_write_kv, heads of 80": lambda: _rotary_and_write_kv(32, 32, 80),
    "rotary_and_write_kv, heads of 128": lambda: _rotary_and_write_kv(32, 8, 128),
    "rotary_and_write_kv, int8": lambda: _rotary_and_write_kv(32, 8, 128, torch.int8),
    "rotary_and_write_kv, float8": lambda: _rotary_and_write_kv(32, 8, 128, torch.float8_e4m3fn),
    "rotary_embedding, heads of 64": lambda: _rotary_embedding(9, 3, 64),
    "rotary_embedding, heads of 80": lambda: _rotary_embedding(32, 32, 80),
    "rotary_embedding, heads of 128": lambda: _rotary_embedding(32, 8, 128),
    "rotary_embedding, heads of 256": lambda: _rotary_embedding(8, 4, 256),
    "sample, 49152": lambda: _sample(1, 49152),
    "sample, 128256": lambda: _sample(256, 128256),
    "sample, 262144": lambda: _sample(64, 262144),
    "silu_and_mul, 14336": lambda: silu_and_mul(_meta(256, 2 * 14336), impl="triton"),
    "silu_and_mul, odd and float16": lambda: silu_and_mul(_meta(3, 2002, dtype=torch.float16), impl="triton"),
    "token_logprobs, none beside": lambda: _token_logprobs(256, 128256, 0),
    "token_logprobs, 1 of 49152": lambda: _token_logprobs(1, 49152, 1),
    "token_logprobs, 20 of 128256": lambda: _token_logprobs(256, 128256, 20),
    "write_kv, heads of 96": lambda: _write_kv(32, 96),
    "write_kv, heads of 128": lambda: _write_kv(8, 128),
    "write_kv, heads of 256, one": lambda: _write_kv(1, 256),
    "write_kv, int8": lambda: _write_kv(8, 128, torch.int8),
    "write_kv, float8": lambda: _write_kv(8, 128, torch.float8_e4m3fn),
}
"""Each launches one kernel or several."""
