"""The KV blocks of a model that computes in the host's memory, as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from triptych_services.worker.attention.base import KvCache


class CpuBlockStore:
    """A `BlockStore`. A block's bytes are its part of each layer's cache in turn, each followed by its scales."""

    def __init__(self, kv_caches: Sequence[KvCache]) -> None:
        """`kv_caches`: [num_layers] in the host's memory."""
        tensors = [
            tensor for cache in kv_caches for tensor in (cache.blocks, cache.scales) if tensor is not None
        ]
        self._parts = [_as_bytes(tensor) for tensor in tensors]
        """The memory of each tensor."""
        self._part_bytes = [tensor[0].nbytes for tensor in tensors]
        """Bytes of a block in each."""
        self.block_bytes = sum(self._part_bytes)

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        for part, start, at, count in self._spans(offset, len(buffer)):
            buffer[at : at + count] = self._row(part, block)[start : start + count]

    def write(self, block: int, offset: int, content: memoryview) -> None:
        for part, start, at, count in self._spans(offset, len(content)):
            self._row(part, block)[start : start + count] = content[at : at + count]

    def _row(self, part: int, block: int) -> memoryview:
        """Return one block's bytes of one tensor."""
        num_bytes = self._part_bytes[part]
        return self._parts[part][block * num_bytes : (block + 1) * num_bytes]

    def _spans(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tensors that a range of a block lies in: which, from where in it, where in the range, how much."""
        done = 0
        for part, part_bytes in enumerate(self._part_bytes):
            if offset >= part_bytes:
                offset -= part_bytes
                continue
            if done == num_bytes:
                return
            count = min(part_bytes - offset, num_bytes - done)
            yield part, offset, done, count
            offset, done = 0, done + count


def _as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    assert tensor.device.type == "cpu", "these blocks are in a device's memory"
    assert tensor.is_contiguous(), "a block is not contiguous"
    return tensor.view(-1).view(torch.uint8).numpy().data
