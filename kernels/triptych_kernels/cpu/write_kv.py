"""Writing keys and values into the paged cache on CPUs."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES, KV_DTYPES
from triptych_kernels.torch.write_kv import write_kv as torch_write_kv


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    if key.dtype not in DTYPES or kv_cache.dtype not in KV_DTYPES:  # float16 in or out, or 8-bit floats
        torch_write_kv(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)
        return
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    launch(
        "write_kv", slot_mapping, DTYPES[key.dtype], KV_DTYPES[kv_cache.dtype],
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
        kv_cache, kv_scales, slot_mapping, num_kv_heads, block_size, head_dim,
    )  # fmt: skip
