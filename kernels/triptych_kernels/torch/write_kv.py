"""Writing keys and values into the paged cache in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    for half, vectors in enumerate((key, value)):
        # the two index tensors stand around a slice, so the indexed shape is [num_tokens, num_kv_heads, …]
        if kv_scales is not None:
            vectors, scales = _quantize(vectors, kv_cache.dtype)
            kv_scales[:, half][block_ids, :, offsets] = scales
        kv_cache[:, half][block_ids, :, offsets] = vectors.to(kv_cache.dtype)


def _quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements of `dtype` like `vectors`, and the float32 scales of its last axis."""
    largest_element = LARGEST_ELEMENT[dtype]
    vectors = vectors.float()
    scales = vectors.abs().amax(dim=-1) / largest_element
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    elements = (vectors / scales[..., None]).clamp(-largest_element, largest_element)
    if dtype == torch.int8:
        elements = elements.round()
    elements = torch.where(scales[..., None] > 0.0, elements, 0.0)  # neither for 0 nor for NaN
    return elements.to(dtype), scales
