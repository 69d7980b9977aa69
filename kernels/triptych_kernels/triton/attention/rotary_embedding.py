"""Rotary position embedding of queries and keys, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 512  # of elements that one program rotates: of 8 heads of 128, 32 bytes per thread of two warps in bfloat16


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if num_tokens and head_dim:
        heads_block, half_block, num_warps = program_of_heads(num_heads, head_dim)
        num_query_groups = triton.cdiv(num_heads, heads_block)
        grid = (num_tokens, num_query_groups + triton.cdiv(num_kv_heads, heads_block))
        _rotary_embedding[grid](
            query, query.stride(0), query.stride(1), query_out,
            key, key.stride(0), key.stride(1), key_out,
            positions, cos_sin_cache,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
            NUM_QUERY_GROUPS=num_query_groups, HEADS_BLOCK=heads_block, HALF_BLOCK=half_block,
            num_warps=num_warps,
        )  # fmt: skip
    return query_out, key_out


def program_of_heads(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the number of heads that one program rotates, of elements of a half with its padding, and of warps."""
    half_block = triton.next_power_of_2(head_dim // 2)
    heads_block = max(min(_PAIRS // half_block, triton.next_power_of_2(num_heads)), 1)
    return heads_block, half_block, max(heads_block * half_block // 256, 1)


@triton.jit
def _rotary_embedding(
    query, query_stride_0, query_stride_1, query_out,
    key, key_stride_0, key_stride_1, key_out,
    positions, cos_sin_cache,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    NUM_QUERY_GROUPS: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token)
    dims = tl.arange(0, HALF_BLOCK)[None, :]
    if group < NUM_QUERY_GROUPS:
        heads = heads_of_group(group, HEADS_BLOCK)
        inside = (heads < NUM_HEADS) & (dims < HALF)
        vectors = query + token * query_stride_0 + heads * query_stride_1 + dims
        first, second = rotate(vectors, inside, cos_sin_cache, position, dims, HALF)
        out = query_out + (token * NUM_HEADS + heads) * (2 * HALF) + dims
    else:
        heads = heads_of_group(group - NUM_QUERY_GROUPS, HEADS_BLOCK)
        inside = (heads < NUM_KV_HEADS) & (dims < HALF)
        vectors = key + token * key_stride_0 + heads * key_stride_1 + dims
        first, second = rotate(vectors, inside, cos_sin_cache, position, dims, HALF)
        out = key_out + (token * NUM_KV_HEADS + heads) * (2 * HALF) + dims
    tl.store(out, first, mask=inside)
    tl.store(out + HALF, second, mask=inside)


@triton.jit
def heads_of_group(group, HEADS_BLOCK: tl.constexpr):
    """Return the numbers of a group's heads, [HEADS_BLOCK, 1] int64."""
    return (group * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None].to(tl.int64)


@triton.jit
def rotate(vectors, inside, cos_sin_cache, position, dims, HALF: tl.constexpr):
    """Return both halves of these heads, [HEADS_BLOCK, HALF_BLOCK] each, rotated to the position and rounded.

    Args:
        vectors: [HEADS_BLOCK, HALF_BLOCK] pointers to the first halves.
        inside: Whether there is such an element.
        dims: [1, HALF_BLOCK] numbers of the elements.
    """
    angles = cos_sin_cache + position * (2 * HALF) + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)
    first = tl.load(vectors, mask=inside, other=0.0)
    second = tl.load(vectors + HALF, mask=inside, other=0.0)
    rotated_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
    rotated_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
    return rotated_first.to(first.dtype), rotated_second.to(first.dtype)
