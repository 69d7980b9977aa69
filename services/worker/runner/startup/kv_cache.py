"""Allocation of the paged KV cache, in the size that `kv_plan` decides.

    layer 0   [ null | block 1 | block 2 | … ]   each block [2 (key, value), num_kv_heads, block_size, head_dim]
    layer 1   [ null | block 1 | block 2 | … ]   block 0 belongs to no request: padding points at it

The blocks of latent attention are [1, 1, block_size, width].

A cache of 8 bits also has scales, with the same block ids. Only ops index these tensors. Only the engine decides which
request holds which block.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from triptych.types.facts import KvLayout
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.context.device import TORCH_DTYPES
from triptych_services.worker.runner.startup.kv_plan import kv_parts, vectors_per_token

_KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def allocate_kv_cache(shape: KvLayout, device: torch.device) -> tuple[KvCache, ...]:
    """Allocate one cache per layer; the content of blocks other than block 0 is undefined.

    On a CPU the system allocates a page when it is first written, so blocks that no request has held take no memory;
    all of the cache is zero then. Block 0 is zeroed: padding may be read and masked, and a NaN would survive the mask.
    """
    scales_shape = (shape.num_blocks, vectors_per_token(shape), shape.num_kv_heads, shape.block_size)
    dtype = _KV_DTYPES[shape.dtype]
    return tuple(
        KvCache(
            _allocate((*scales_shape, shape.head_dim), dtype, device),
            _allocate(scales_shape, torch.float32, device) if dtype in LARGEST_ELEMENT else None,
        )
        for _ in range(shape.num_layers)
    )


def view_kv_cache(shape: KvLayout, memory: mmap.mmap) -> tuple[KvCache, ...]:
    """Return the caches of all layers in memory that `kv_parts` divides, on the CPU."""
    scales_shape = (shape.num_blocks, vectors_per_token(shape), shape.num_kv_heads, shape.block_size)
    tensors: dict[str, Tensor] = {}
    for name, start, num_bytes in kv_parts(shape):
        part = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
        if name.endswith("blocks"):
            tensors[name] = part.view(_KV_DTYPES[shape.dtype]).view(*scales_shape, shape.head_dim)
        else:
            tensors[name] = part.view(torch.float32).view(scales_shape)
    return tuple(
        KvCache(tensors[f"{layer}.blocks"], tensors.get(f"{layer}.scales"))
        for layer in range(shape.num_layers)
    )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    blocks = torch.empty(shape, dtype=dtype, device=device)
    blocks[0].zero_()
    return blocks
