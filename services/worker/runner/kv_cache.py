"""The memory that the paged KV cache stands in; how much of it, says `kv_plan`.

    layer 0   [ null | block 1 | block 2 | … ]   each block [2 (key, value), num_kv_heads, block_size, head_dim]
    layer 1   [ null | block 1 | block 2 | … ]   block 0 is held by no request: padding points at it

Only ops index these tensors; the engine alone decides who holds which block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.device import TORCH_DTYPES
from triptych.types.facts import KvShape
from triptych_kernels.cpu.memory import zeros_in_huge_pages


def allocate_kv_cache(shape: KvShape, device: torch.device) -> tuple[Tensor, ...]:
    """One tensor per layer, [num_blocks, 2, num_kv_heads, block_size, head_dim], content undefined.

    On a CPU the system backs a page when it is first written, so blocks that no request ever held cost
    nothing; all of it is zero then. Block 0 is zeroed: padding may be read and masked, and a stray NaN would
    survive the mask.
    """
    size = (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    dtype = TORCH_DTYPES[shape.dtype]
    if device.type == "cpu":
        return tuple(zeros_in_huge_pages(size, dtype) for _ in range(shape.num_layers))
    layers = tuple(torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers))
    for layer in layers:
        layer[0].zero_()
    return layers
