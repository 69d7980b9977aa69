"""Writing keys and values into the paged cache, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT


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
    """The elements and the scale of one vector, computed in float32 as `kv_scales` defines them."""
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
