"""Writing keys and values into the paged cache on CPUs."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES
from triptych_kernels.torch.write_kv import write_kv as torch_write_kv


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    if key.dtype not in DTYPES:  # float16 into a cache of another dtype
        torch_write_kv(key, value, kv_cache, slot_mapping)
        return
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    launch(
        "write_kv", slot_mapping, DTYPES[key.dtype], DTYPES[kv_cache.dtype],
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
        kv_cache, slot_mapping, num_kv_heads, block_size, head_dim,
    )  # fmt: skip
