"""Rotary position embedding and the paged cache on CPUs: two native kernels."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.cpu.rotary_embedding import rotary_embedding
from triptych_kernels.cpu.write_kv import write_kv


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
) -> Tensor:
    query, key = rotary_embedding(query, key, positions, cos_sin_cache)
    write_kv(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)
    return query
