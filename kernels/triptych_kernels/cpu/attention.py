"""Attention, rotary embeddings and the paged cache by the native kernels.

A block's keys lie as their products read them: word by word, each of four bytes, for all keys of the block.

    shape            [num_blocks, 2, num_kv_heads, block_size, head_dim], the same for all implementations
    keys, as rows    [block_size, head_dim]
    keys, in words   [head_dim / n, block_size, n]; n = 1 element of float32, 2 of bfloat16, 4 of int8
    values           [block_size, head_dim]

So attention loads a word of 8 or 16 keys at a time, without transposing keys in every step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.dtypes import DTYPES, KV_DTYPES
from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.recording import NotRecordable
from triptych_kernels.torch.attention import paged_attention as torch_paged_attention
from triptych_kernels.torch.attention import rotary_and_write_kv as rotate_and_write
from triptych_kernels.torch.attention import write_kv as torch_write_kv

_WORD_BYTES = 4


def serves(kv_cache: Tensor) -> bool:
    """Return whether the native kernels keep such a cache. Plain torch serves float16 and 8-bit floats, and keys that
    are no whole words."""
    return kv_cache.dtype in KV_DTYPES and kv_cache.shape[4] % _elements_per_word(kv_cache) == 0


def _elements_per_word(kv_cache: Tensor) -> int:
    return max(_WORD_BYTES // kv_cache.itemsize, 1)


def keys_in_words(kv_cache: Tensor) -> Tensor:
    """Return a copy of a cache that has keys as rows, with keys as the native kernels keep them."""
    copy = kv_cache.clone()
    keys = kv_cache[:, 0].unflatten(-1, (-1, _elements_per_word(kv_cache)))
    copy[:, 0] = keys.transpose(2, 3).reshape(copy[:, 0].shape)
    return copy


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    kv_scales: Tensor | None,
    query_lens_list: tuple[int, ...] | None,
    seq_lens_list: tuple[int, ...] | None,
) -> Tensor:
    """Attend by the native kernel, or by plain torch over a cache that it does not read, see `serves`.

    Raises:
        NotRecordable: Such a cache in a recording, which has no lists of lengths.
    """
    if not serves(kv_cache):
        if query_lens_list is None or seq_lens_list is None:
            raise NotRecordable(
                f"paged_attention: no native kernel reads a cache of {kv_cache.dtype} with head_dim {kv_cache.shape[4]}"
            )
        return torch_paged_attention(
            query, kv_cache, block_tables, query_starts, seq_lens, options, kv_scales=kv_scales,
            query_lens_list=query_lens_list, seq_lens_list=seq_lens_list,
        )  # fmt: skip
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(
        "paged_attention", seq_lens, query,
        dtype=DTYPES[query.dtype], cache_dtype=KV_DTYPES[kv_cache.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        kv_cache=kv_cache, vector_stride=head_dim, kv_scales=kv_scales,
        block_tables=block_tables, block_table_stride=block_tables.stride(0),
        query_starts=query_starts, seq_lens=seq_lens, out=out,
        num_heads=query.shape[1], num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=head_dim, is_latent=False,
        block_size=block_size, scale=options.scale, window=options.window, chunk=options.chunk,
        soft_cap=options.soft_cap, sinks=options.sinks, alibi=options.alibi, stages=None,
    )  # fmt: skip
    return out


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    has_keys = key.shape[1] > 0  # a recording holds no tensors without elements
    launch(
        "rotary_embedding", positions, dtype=DTYPES[query.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        key=key if has_keys else None, key_stride=key.stride(0), key_head_stride=key.stride(1),
        positions=positions, cos_sin=cos_sin_cache,
        query_out=query_out, key_out=key_out if has_keys else None,
        num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=query.shape[2],
        rotary_dim=cos_sin_cache.shape[1], interleaved=interleaved,
    )  # fmt: skip
    return query_out, key_out


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    if key.dtype not in DTYPES or not serves(kv_cache):
        torch_write_kv(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)
        return
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    launch(
        "write_kv", slot_mapping, dtype=DTYPES[key.dtype], cache_dtype=KV_DTYPES[kv_cache.dtype],
        key=key, key_stride=key.stride(0), key_head_stride=key.stride(1),
        value=value, value_stride=value.stride(0), value_head_stride=value.stride(1),
        kv_cache=kv_cache, kv_scales=kv_scales, slots=slot_mapping,
        num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim,
    )  # fmt: skip


rotary_and_write_kv = partial(rotate_and_write, rotate=rotary_embedding, write=write_kv)
