"""The KV blocks and pages of states of a model that computes in the host's memory, as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from triptych_services.worker.attention.base import KvCache


class CpuBlockStore:
    """A `BlockStore`. A block's bytes are its part of each tensor of the cache in turn, each followed by its scales.

    Layers of several groups share a tensor, in which each group has other blocks. A page's bytes are the states of all
    layers.
    """

    def __init__(self, kv_caches: Sequence[KvCache]) -> None:
        """`kv_caches`: [num_layers] in the host's memory."""
        by_memory = {cache.blocks.data_ptr(): cache for cache in kv_caches if cache.blocks.numel()}
        self._blocks = _Rows(
            [
                tensor
                for cache in by_memory.values()
                for tensor in (cache.blocks, cache.scales)
                if tensor is not None
            ]
        )
        states = [cache.state for cache in kv_caches if cache.state is not None]
        self._pages = _Rows([_pages_of(states)] if states else [])

    def num_bytes(self, block: int) -> int:
        return (self._blocks if block > 0 else self._pages).num_bytes

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        rows = self._blocks if block > 0 else self._pages
        for part, start, count in rows.spans(abs(block), offset, len(buffer)):
            buffer[start : start + count] = part

    def write(self, block: int, offset: int, content: memoryview) -> None:
        rows = self._blocks if block > 0 else self._pages
        for part, start, count in rows.spans(abs(block), offset, len(content)):
            part[:] = content[start : start + count]


class _Rows:
    """Tensors that have a part of each block."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors`: each [num_blocks, ...]."""
        self._memory = [_as_bytes(tensor) for tensor in tensors]
        self._row_bytes = [tensor[0].nbytes for tensor in tensors]
        """Bytes of a block in each."""
        self.num_bytes = sum(self._row_bytes)
        """Bytes of a block."""

    def spans(self, block: int, offset: int, num_bytes: int) -> Iterator[tuple[memoryview, int, int]]:
        """Yield the memory of a range of a block: a part, where it lies in the range, and its bytes."""
        done = 0
        for memory, row_bytes in zip(self._memory, self._row_bytes, strict=True):
            if offset >= row_bytes:
                offset -= row_bytes
                continue
            if done == num_bytes:
                return
            count = min(row_bytes - offset, num_bytes - done)
            start = block * row_bytes + offset
            yield memory[start : start + count], done, count
            offset, done = 0, done + count


def _pages_of(states: Sequence[Tensor]) -> Tensor:
    """Return the tensor of whole pages: [num_pages, numbers of all layers]. Pages begin with the first layer's."""
    num_elements = sum(state.shape[1] for state in states)
    return states[0].as_strided((len(states[0]), num_elements), (num_elements, 1))


def _as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    assert tensor.device.type == "cpu", "these blocks are in a device's memory"
    assert tensor.is_contiguous(), "a block is not contiguous"
    return tensor.view(-1).view(torch.uint8).numpy().data
