"""Rotary position embedding of queries and keys, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 512  # of elements that one program rotates: of 8 heads of 128, 32 bytes per thread of two warps in bfloat16


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool
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
            ROTARY_HALF=cos_sin_cache.shape[1] // 2, INTERLEAVED=interleaved,
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
    ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NUM_QUERY_GROUPS: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
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
    else:
        heads = heads_of_group(group - NUM_QUERY_GROUPS, HEADS_BLOCK)
        inside = (heads < NUM_KV_HEADS) & (pairs < HALF)
        vectors = key + token * key_stride_0 + heads * key_stride_1
        first, second = rotate(
            vectors, inside, cos_sin_cache, position, pairs, firsts, seconds, HALF, ROTARY_HALF
        )
        out = key_out + (token * NUM_KV_HEADS + heads) * (2 * HALF)
    tl.store(out + firsts, first, mask=inside)
    tl.store(out + seconds, second, mask=inside)


@triton.jit
def heads_of_group(group, HEADS_BLOCK: tl.constexpr):
    """Return the numbers of a group's heads, [HEADS_BLOCK, 1] int64."""
    return (group * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None].to(tl.int64)


@triton.jit
def elements_of_pairs(pairs, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the numbers of the elements of a head's pairs: those that are rotated, then the rest, taken by halves.

    Args:
        pairs: [1, HALF_BLOCK] numbers of pairs, ROTARY_HALF of which are rotated and HALF exist.
    """
    firsts, seconds = pairs, pairs + ROTARY_HALF
    if INTERLEAVED:
        firsts, seconds = 2 * pairs, 2 * pairs + 1
    if ROTARY_HALF < HALF:
        is_rotated = pairs < ROTARY_HALF
        firsts = tl.where(is_rotated, firsts, pairs + ROTARY_HALF)
        seconds = tl.where(is_rotated, seconds, pairs + HALF)
    return firsts, seconds


@triton.jit
def rotate(
    vectors, inside, cos_sin_cache, position, pairs, firsts, seconds, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr
):  # fmt: skip
    """Return both elements of these heads' pairs, [HEADS_BLOCK, HALF_BLOCK] each, rotated to the position and rounded.

    Args:
        vectors: [HEADS_BLOCK, 1] pointers to the heads.
        inside: Whether there is such a pair.
        pairs: [1, HALF_BLOCK] numbers of the pairs; firsts and seconds are the results of `elements_of_pairs`.
    """
    angles = cos_sin_cache + position * (2 * ROTARY_HALF) + pairs
    is_rotated = pairs < ROTARY_HALF
    cos = tl.load(angles, mask=is_rotated, other=0.0)
    sin = tl.load(angles + ROTARY_HALF, mask=is_rotated, other=0.0)
    first = tl.load(vectors + firsts, mask=inside, other=0.0)
    second = tl.load(vectors + seconds, mask=inside, other=0.0)
    rotated_first = (first.to(tl.float32) * cos - second.to(tl.float32) * sin).to(first.dtype)
    rotated_second = (second.to(tl.float32) * cos + first.to(tl.float32) * sin).to(first.dtype)
    if ROTARY_HALF < HALF:
        rotated_first = tl.where(is_rotated, rotated_first, first)
        rotated_second = tl.where(is_rotated, rotated_second, second)
    return rotated_first, rotated_second
