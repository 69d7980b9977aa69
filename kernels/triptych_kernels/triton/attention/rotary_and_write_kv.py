"""Rotary position embedding and the paged cache in one launch: rotated keys go directly to their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.triton.attention.rotary_embedding import (
    elements_of_pairs,
    heads_of_group,
    program_of_heads,
    rotate,
)
from triptych_kernels.triton.attention.write_kv import largest_finite, quantize, scales_of, vectors_in_cache


def rotary_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None,
    interleaved: bool,
) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens and head_dim:
        heads_block, half_block, num_warps = program_of_heads(num_heads, head_dim)
        num_query_groups, num_kv_groups = (triton.cdiv(n, heads_block) for n in (num_heads, num_kv_heads))
        # programs of one token: its queries, then its keys, then its values
        _rotary_and_write_kv[(num_tokens, num_query_groups + 2 * num_kv_groups)](
            query, query.stride(0), query.stride(1), query_out,
            key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
            positions, cos_sin_cache, kv_cache, kv_scales, slot_mapping,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK_SIZE=kv_cache.shape[3],
            ROTARY_HALF=cos_sin_cache.shape[1] // 2, INTERLEAVED=interleaved,
            LARGEST_ELEMENT=LARGEST_ELEMENT.get(kv_cache.dtype, 0.0),
            NUM_QUERY_GROUPS=num_query_groups, NUM_KV_GROUPS=num_kv_groups,
            HEADS_BLOCK=heads_block, HALF_BLOCK=half_block, num_warps=num_warps,
        )  # fmt: skip
    return query_out


@triton.jit
def _rotary_and_write_kv(
    query, query_stride_0, query_stride_1, query_out,
    key, key_stride_0, key_stride_1, value, value_stride_0, value_stride_1,
    positions, cos_sin_cache, kv_cache, kv_scales, slot_mapping,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    LARGEST_ELEMENT: tl.constexpr, NUM_QUERY_GROUPS: tl.constexpr, NUM_KV_GROUPS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token)
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    firsts, seconds = elements_of_pairs(pairs, HALF, ROTARY_HALF, INTERLEAVED)
    if group < NUM_QUERY_GROUPS:
        heads = heads_of_group(group, HEADS_BLOCK)
        inside = (heads < NUM_HEADS) & (pairs < HALF)
        vectors = query + token * query_stride_0 + heads * query_stride_1
        first, second = rotate(
            vectors, inside, cos_sin_cache, position, pairs, firsts, seconds, HALF, ROTARY_HALF
        )
        out = query_out + (token * NUM_HEADS + heads) * (2 * HALF)
        tl.store(out + firsts, first, mask=inside)
        tl.store(out + seconds, second, mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            kv_group = group - NUM_QUERY_GROUPS
            half = kv_group // NUM_KV_GROUPS  # 0: keys, 1: values
            heads = heads_of_group(kv_group % NUM_KV_GROUPS, HEADS_BLOCK)
            inside = (heads < NUM_KV_HEADS) & (pairs < HALF)
            if half == 0:
                vectors = key + token * key_stride_0 + heads * key_stride_1
                first, second = rotate(
                    vectors, inside, cos_sin_cache, position, pairs, firsts, seconds, HALF, ROTARY_HALF
                )
            else:
                vectors = value + token * value_stride_0 + heads * value_stride_1
                first = tl.load(vectors + firsts, mask=inside, other=0.0)
                second = tl.load(vectors + seconds, mask=inside, other=0.0)
            numbers = vectors_in_cache(slot, half, heads, NUM_KV_HEADS, BLOCK_SIZE)
            if kv_scales is not None:
                largest = tl.maximum(largest_finite(first), largest_finite(second))
                scales = scales_of(largest, LARGEST_ELEMENT)
                tl.store(kv_scales + numbers, scales, mask=heads < NUM_KV_HEADS)
                first = quantize(first, scales, LARGEST_ELEMENT)
                second = quantize(second, scales, LARGEST_ELEMENT)
            out = kv_cache + numbers * (2 * HALF)
            tl.store(out + firsts, first.to(kv_cache.dtype.element_ty), mask=inside)
            tl.store(out + seconds, second.to(kv_cache.dtype.element_ty), mask=inside)
