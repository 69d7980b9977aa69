"""Attention, rotary embeddings and the paged cache, one vector at a time in float64."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.torch.attention import rotary_and_write_kv as rotate_and_write


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    kv_scales: Tensor | None,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    num_kv_heads, block_size = kv_cache.shape[2:4]
    heads_per_kv_head = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    starts = query_starts.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        for token in range(start, end):
            position = seq_len - (end - start) + (token - start)
            seen = range(_first_seen(position, options), position + 1)
            slots = [(int(block_tables[row, p // block_size]), p % block_size) for p in seen]
            for head in range(query.shape[1]):
                kv_head = head // heads_per_kv_head
                keys, values = (
                    torch.stack([kv_cache[block, half, kv_head, offset].double() for block, offset in slots])
                    for half in (0, 1)
                )
                if kv_scales is not None:
                    key_scales, value_scales = (
                        torch.stack([kv_scales[block, half, kv_head, offset] for block, offset in slots])
                        for half in (0, 1)
                    )
                    keys, values = keys * key_scales[:, None], values * value_scales[:, None]
                scores = keys @ query[token, head].double() * options.scale
                weights = _softmax(scores, seen, head, options)
                out[token, head] = weights @ values
    return out


def _first_seen(position: int, options: AttendOptions) -> int:
    first = 0
    if options.window:
        first = max(first, position - options.window + 1)
    if options.chunk:
        first = max(first, position // options.chunk * options.chunk)
    return first


def _softmax(scores: Tensor, seen: range, head: int, options: AttendOptions) -> Tensor:
    """Return the weights of the keys that a query sees; the last of them is its own."""
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    if options.alibi is not None:
        distances = torch.tensor([key - seen[-1] for key in seen], dtype=torch.float64)
        scores = scores + options.alibi[head].double() * distances
    if options.sinks is None:
        return torch.softmax(scores, dim=0)
    return torch.softmax(torch.cat([scores, options.sinks[head : head + 1].double()]), dim=0)[:-1]


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    half = cos_sin_cache.shape[1] // 2
    rotated = []
    for x in (query, key):
        out = x.clone()
        for token, position in enumerate(positions.tolist()):
            for i in range(half):
                cos = cos_sin_cache[position, i].item()
                sin = cos_sin_cache[position, half + i].item()
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                first, second = x[token, :, a].double(), x[token, :, b].double()
                out[token, :, a] = first * cos - second * sin
                out[token, :, b] = second * cos + first * sin
        rotated.append(out)
    return rotated[0], rotated[1]


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block_id, offset = divmod(slot, block_size)
        for half, vectors in enumerate((key, value)):
            for head in range(key.shape[1]):
                vector = vectors[token, head]
                if kv_scales is not None:
                    vector, kv_scales[block_id, half, head, offset] = _quantize(vector, kv_cache.dtype)
                kv_cache[block_id, half, head, offset] = vector


def _quantize(vector: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the elements and the scale of one vector, computed in float32 as `kv_scales` defines them."""
    largest_element = LARGEST_ELEMENT[dtype]
    largest = vector.float().abs().max()
    if not math.isfinite(largest):
        return torch.zeros_like(vector), math.nan
    scale = largest / largest_element
    if scale == 0.0:
        return torch.zeros_like(vector), 0.0
    elements = (vector.float() / scale).clamp(-largest_element, largest_element)
    if dtype == torch.int8:
        elements = torch.tensor([round(element) for element in elements.tolist()])
    return elements.to(dtype), scale.item()


rotary_and_write_kv = partial(rotate_and_write, rotate=rotary_embedding, write=write_kv)
