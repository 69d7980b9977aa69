"""Calls of the ops as models make them: what `test_compiles` compiles for Hopper, kernel by kernel.

One line per call. Operands are on the meta device, so a launcher that waits for the device, by `.item()` or a shape
read from a tensor, fails here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.ops import (
    embedding,
    fused_moe,
    gated_linear,
    linear,
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
from triptych_kernels.triton.linear.few_rows import GATED_LINEAR, LINEAR, Tiles, multiply_few_rows
from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat


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
        query_lens_list=query_lens,
        seq_lens_list=(8192,) * num_rows,
        impl="triton",
    )


_MIXTRAL = 8, 2, 4096, 14336  # num_experts, top_k, hidden_size, intermediate_size


def _few_rows(
    num_rows: int,
    out_features: int,
    in_features: int,
    tiles: Tiles,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
) -> object:
    """One of the candidates for such a product."""
    tunable = LINEAR if activation is None else GATED_LINEAR
    assert tiles in tunable.candidates(out_features, in_features, dtype, 1)
    x, weight = (_meta(rows, in_features, dtype=dtype) for rows in (num_rows, out_features))
    bias = _meta(out_features, dtype=dtype)
    return multiply_few_rows(x, weight, bias, out_dtype or dtype, activation, tiles)


def _fused_moe(num_tokens: int, num_experts: int, top_k: int, hidden_size: int, inner: int) -> object:
    return fused_moe(
        _meta(num_tokens, hidden_size),
        _float32(num_tokens, num_experts),
        _meta(num_experts, 2 * inner, hidden_size),
        _meta(num_experts, hidden_size, inner),
        top_k=top_k,
        impl="triton",
    )


def _quantized_moe(num_tokens: int, bits: int, *, affine: bool = False, **options: bool) -> object:
    num_experts, top_k, hidden_size, inner = _MIXTRAL
    format, meta = QuantizedFormat(bits, is_affine=affine), torch.device("meta")
    stacks = [
        GroupQuantizedExperts(
            num_experts, *shape, torch.bfloat16, format, device=meta, gated=gated, **options
        )
        for gated, shape in ((True, (2 * inner, hidden_size)), (False, (hidden_size, inner)))
    ]
    return fused_moe(_meta(num_tokens, hidden_size), _float32(num_tokens, num_experts), *stacks, top_k=top_k)


def _w8a8_moe(num_tokens: int, element: torch.dtype) -> object:
    num_experts, top_k, hidden_size, inner = _MIXTRAL
    meta = torch.device("meta")
    stacks = [
        ChannelQuantizedExperts(num_experts, *shape, torch.bfloat16, element, device=meta, gated=gated)
        for gated, shape in ((True, (2 * inner, hidden_size)), (False, (hidden_size, inner)))
    ]
    return fused_moe(_meta(num_tokens, hidden_size), _float32(num_tokens, num_experts), *stacks, top_k=top_k)


def _quantized(
    bits: int, out_features: int, in_features: int, *, affine: bool, **options: bool
) -> GroupQuantizedWeight:
    format = QuantizedFormat(bits, is_affine=affine)
    meta = torch.device("meta")
    return GroupQuantizedWeight(out_features, in_features, torch.bfloat16, format, device=meta, **options)


def _quantized_linear(
    num_rows: int, bits: int, *, affine: bool, dtype: torch.dtype = torch.bfloat16, **options: bool
) -> object:
    weight = _quantized(bits, 6144, 4096, affine=affine, **options)
    weight.dtype = dtype
    return linear(_meta(num_rows, 4096, dtype=dtype), weight)


def _w8a8_linear(num_rows: int, element: torch.dtype, *, gated: bool = False) -> object:
    meta = torch.device("meta")
    weight = ChannelQuantizedWeight(6144, 4096, torch.bfloat16, element, device=meta, gated=gated)
    x = _meta(num_rows, 4096)
    return gated_linear(x, weight) if gated else linear(x, weight)


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
    "embedding, widened": lambda: embedding(
        _int64(256), _meta(128256, 4096), out_dtype=torch.float32, impl="triton"
    ),
    "fused_moe, Mixtral, 1 token": lambda: _fused_moe(1, 8, 2, 4096, 14336),
    "fused_moe, Mixtral, 128 tokens": lambda: _fused_moe(128, 8, 2, 4096, 14336),
    "fused_moe, Mixtral, 256 tokens": lambda: _fused_moe(256, 8, 2, 4096, 14336),
    "fused_moe, Mixtral, 4096 tokens": lambda: _fused_moe(4096, 8, 2, 4096, 14336),
    "fused_moe, 128 experts": lambda: _fused_moe(256, 128, 8, 2048, 768),
    "fused_moe, 4 bits, 1 token": lambda: _quantized_moe(1, 4, affine=True),
    "fused_moe, 4 bits, 128 tokens": lambda: _quantized_moe(128, 4, affine=True),
    "fused_moe, 4 bits, 256 tokens": lambda: _quantized_moe(256, 4, affine=True),
    "fused_moe, 4 bits, 4096 tokens by weights": lambda: _quantized_moe(
        4096, 4, affine=True, batch_invariant=False
    ),
    "fused_moe, 8 bits, 1 token": lambda: _quantized_moe(1, 8),
    "fused_moe, 8 bits, 4096 tokens by weights": lambda: _quantized_moe(4096, 8, batch_invariant=False),
    "fused_moe, int8, 1 token": lambda: _w8a8_moe(1, torch.int8),
    "fused_moe, float8, 4096 tokens": lambda: _w8a8_moe(4096, torch.float8_e4m3fn),
    "gated_linear, silu": lambda: gated_linear(_meta(256, 4096), _meta(28672, 4096), impl="triton"),
    "gated_linear, gelu": lambda: gated_linear(
        _meta(256, 2304), _meta(18432, 2304), activation="gelu_pytorch_tanh", impl="triton"
    ),
    "gated_linear, few rows, 8B": lambda: _few_rows(
        1, 28672, 4096, Tiles(16, 256, 1, 2, 5), activation="silu"
    ),
    "gated_linear, few rows, 8B, 4 warps": lambda: _few_rows(
        16, 28672, 4096, Tiles(64, 128, 1, 4, 3), activation="silu"
    ),
    "gated_linear, few rows, 0.6B, gelu": lambda: _few_rows(
        4, 6144, 1024, Tiles(32, 128, 1, 4, 5), activation="gelu_pytorch_tanh"
    ),
    "gated_linear, few rows, float32": lambda: _few_rows(
        1, 6144, 1024, Tiles(32, 64, 1, 4, 5), activation="silu", dtype=torch.float32
    ),
    "linear, few rows, 8B, query, key and value": lambda: _few_rows(1, 6144, 4096, Tiles(32, 128, 1, 4, 9)),
    "linear, few rows, 8B, out": lambda: _few_rows(16, 4096, 4096, Tiles(16, 256, 1, 1, 5)),
    "linear, few rows, 8B, down": lambda: _few_rows(1, 4096, 14336, Tiles(64, 256, 4, 4, 3)),
    "linear, few rows, 8B, head": lambda: _few_rows(
        1, 128256, 4096, Tiles(128, 128, 1, 4, 3), out_dtype=torch.float32
    ),
    "linear, few rows, 0.6B, down in float16": lambda: _few_rows(
        4, 1024, 3072, Tiles(16, 512, 4, 2, 5), dtype=torch.float16
    ),
    "linear, few rows, 0.6B, head": lambda: _few_rows(
        1, 151936, 1024, Tiles(64, 64, 1, 4, 9), out_dtype=torch.float32
    ),
    "linear, few rows, float32": lambda: _few_rows(
        1, 4096, 4096, Tiles(64, 64, 4, 4, 5), dtype=torch.float32
    ),
    "paged_attention, heads of 64": lambda: _paged_attention(_MIXED, 3, 64, group=3),
    "paged_attention, heads of 80": lambda: _paged_attention(_MIXED, 32, 80, group=1),
    "paged_attention, heads of 96": lambda: _paged_attention(_MIXED, 8, 96),
    "paged_attention, heads of 128": lambda: _paged_attention(_MIXED, 8, 128),
    "paged_attention, heads of 256, window": lambda: _paged_attention(_MIXED, 4, 256, group=2, window=4096),
    "paged_attention, int8": lambda: _paged_attention(_MIXED, 8, 128, torch.int8),
    "paged_attention, float8, heads of 256, window": lambda: _paged_attention(
        _MIXED, 4, 256, torch.float8_e4m3fn, group=2, window=4096
    ),
    "process_logits, 128256": lambda: _process_logits(256, 128256, 4000),
    "process_logits, one entry each": lambda: _process_logits(1, 49152, 1),
    "rms_norm, heads of 128": lambda: rms_norm(_heads(16, 8, 128)[0], _meta(128), 1e-6, impl="triton"),
    "quantized linear, 4 bits, a row": lambda: _quantized_linear(1, 4, affine=True),
    "quantized linear, 4 bits, 32 rows": lambda: _quantized_linear(32, 4, affine=True),
    "quantized linear, 4 bits, 64 rows in float16": lambda: _quantized_linear(
        64, 4, affine=True, dtype=torch.float16
    ),
    "quantized linear, 4 bits, 2048 rows": lambda: _quantized_linear(2048, 4, affine=True),
    "quantized linear, 4 bits, 2048 rows by weights": lambda: _quantized_linear(
        2048, 4, affine=True, batch_invariant=False
    ),
    "quantized linear, 4 bits, symmetric, in float32": lambda: _quantized_linear(
        16, 4, affine=False, dtype=torch.float32
    ),
    "quantized linear, 8 bits, a row": lambda: _quantized_linear(1, 8, affine=False),
    "quantized linear, 8 bits, 2048 rows": lambda: _quantized_linear(2048, 8, affine=True),
    "quantized linear, 8 bits, 2048 rows by weights": lambda: _quantized_linear(
        2048, 8, affine=False, batch_invariant=False
    ),
    "quantized gated_linear, 4 bits": lambda: gated_linear(
        _meta(1, 4096), _quantized(4, 28672, 4096, affine=True, gated=True), impl="triton"
    ),
    "quantized gated_linear, 4 bits, 2048 rows": lambda: gated_linear(
        _meta(2048, 4096), _quantized(4, 28672, 4096, affine=True, gated=True), impl="triton"
    ),
    "quantized gated_linear, 4 bits, 2048 rows by weights": lambda: gated_linear(
        _meta(2048, 4096),
        _quantized(4, 28672, 4096, affine=True, gated=True, batch_invariant=False),
        activation="gelu_pytorch_tanh",
        impl="triton",
    ),
    "quantized gated_linear, 8 bits, 32 rows": lambda: gated_linear(
        _meta(32, 4096), _quantized(8, 28672, 4096, affine=False, gated=True), impl="triton"
    ),
    "quantized embedding, 4 bits": lambda: embedding(
        _int64(256), _quantized(4, 128256, 4096, affine=True), impl="triton"
    ),
    "quantized embedding, 8 bits": lambda: embedding(
        _int64(256), _quantized(8, 128256, 4096, affine=False), impl="triton"
    ),
    "w8a8 linear, int8, a row": lambda: _w8a8_linear(1, torch.int8),
    "w8a8 linear, int8, 64 rows": lambda: _w8a8_linear(64, torch.int8),
    "w8a8 linear, int8, 2048 rows": lambda: _w8a8_linear(2048, torch.int8),
    "w8a8 linear, float8, a row": lambda: _w8a8_linear(1, torch.float8_e4m3fn),
    "w8a8 linear, float8, 2048 rows": lambda: _w8a8_linear(2048, torch.float8_e4m3fn),
    "w8a8 gated_linear, float8, 64 rows": lambda: _w8a8_linear(64, torch.float8_e4m3fn, gated=True),
    "w8a8 gated_linear, int8, 2048 rows": lambda: _w8a8_linear(2048, torch.int8, gated=True),
    "w8a8 gated_linear, float8, 2048 rows": lambda: _w8a8_linear(2048, torch.float8_e4m3fn, gated=True),
    "quantize_rows, int8": lambda: quantize_rows(_meta(256, 14336), torch.int8),
    "quantize_rows, float8": lambda: quantize_rows(_meta(256, 28672), torch.float8_e4m3fn),
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
