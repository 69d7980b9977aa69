"""Memory in huge pages, for weights, KV caches and activations, which every step reads.

With 4 kB pages a processor spends a tenth of a step looking up addresses: 135M bfloat16 weights are 66,000 pages. The
system is asked for pages of 2 MB. If it grants none, memory has ordinary pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych_kernels.cpu.huge_pages import map_zeros

_SLAB_BYTES = 64 << 20  # weights smaller than a huge page share some
_ALIGNMENT = 64  # bytes: a cache line, and a vector


class _Slab:
    """A piece of zeros that is given out from the beginning. Its memory is freed with the last tensor in it."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = map_zeros(num_bytes)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return zeros of this shape, or None if too few bytes are left."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._memory):
            return None
        part = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=self._used)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part.view(*shape)


_slabs: list[_Slab] = []
"""The slab that small tensors share, if there is one."""


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros [shape] on the CPU, aligned to a cache line.

    The system backs a page when it is first written. Call this from one thread at a time.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(*shape, dtype=dtype)
    if num_bytes >= _SLAB_BYTES // 2:
        slab = _Slab(num_bytes)
    else:
        taken = _slabs[0].take(shape, dtype) if _slabs else None
        if taken is not None:
            return taken
        slab = _Slab(_SLAB_BYTES)
        _slabs[:] = [slab]
    whole = slab.take(shape, dtype)
    assert whole is not None, "a new slab has enough bytes"
    return whole
