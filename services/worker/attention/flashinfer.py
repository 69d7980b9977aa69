"""Attention by the flashinfer package, which is optional. Our cache has the layout that it calls HND.

A step is planned on the host, once for all layers, so no CUDA graph records it.

Source: FlashInfer, arXiv:2501.01005; flashinfer/{prefill,decode}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.attention.base import AttentionBatch, KvCache

_WORKSPACE_BYTES = 384 << 20
"""Memory for partial results. The package's examples take 128 MiB, which long prompts of many heads overflow."""

_MIN_TENSOR_CORE_GROUP = 4
"""Least number of query heads per key head for which tensor cores decode faster, as these fill a tile's rows."""


class FlashInferAttention:
    """An `AttentionBackend`."""

    name = "flashinfer"
    in_graphs = False
    writer: str | None = None
    supported = frozenset({"window", "soft_cap"})

    def __init__(self, device: torch.device, *, heads_per_kv_head: int) -> None:
        """Allocate the workspaces now, so that their memory is not counted as free for KV blocks."""
        package = import_module("flashinfer")
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decodes = _Planned(
            package.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=heads_per_kv_head >= _MIN_TENSOR_CORE_GROUP
            ),
            device,
        )
        self._rows = _Planned(package.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND"), device)

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        is_decode = batch.max_query_len == 1
        planned = self._decodes if is_decode else self._rows
        limits = _Limits(options.scale, options.window, options.soft_cap)
        if not planned.is_for(batch, limits):
            num_kv_heads, block_size, head_dim = kv_cache.blocks.shape[2:]
            indptr, last_page_len = _pages_of_rows(batch.seq_lens_list, block_size)
            indices = _page_indices(batch, block_size, num_pages=int(indptr[-1]))
            pages = indptr, indices, last_page_len
            sizes = query.shape[1], num_kv_heads, head_dim, block_size
            dtypes = {"q_data_type": query.dtype, "kv_data_type": kv_cache.blocks.dtype}
            if is_decode:
                planned.plan(batch, limits, *pages, *sizes, **dtypes)
            else:
                query_indptr = _starts(batch.query_lens_list)
                planned.plan(batch, limits, query_indptr, *pages, *sizes, causal=True, **dtypes)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        planned.wrapper.run(query, kv_cache.blocks, out=out)
        return out


@dataclass(frozen=True, slots=True)
class _Limits:
    """The options of a layer that a plan depends on, as in `AttendOptions`."""

    scale: float
    window: int
    soft_cap: float


class _Event(Protocol):
    """A point on the device's stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Planned:
    """A wrapper of the package, and the step that it is planned for."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._step: tuple[AttentionBatch, _Limits] | None = None
        # The wrapper writes a plan to its own pinned memory without checking that the device has read the plan before,
        # and we launch steps ahead of the device.
        self._was_read: _Event | None = torch.cuda.Event() if device.type == "cuda" else None

    def is_for(self, batch: AttentionBatch, limits: _Limits) -> bool:
        return self._step is not None and self._step[0] is batch and self._step[1] == limits

    def plan(self, batch: AttentionBatch, limits: _Limits, *arguments: Any, **options: Any) -> None:
        if self._was_read is not None:
            self._was_read.synchronize()
        self.wrapper.plan(
            *arguments,
            sm_scale=limits.scale,
            window_left=limits.window - 1,  # keys before the query's own; -1: all
            logits_soft_cap=limits.soft_cap,
            **options,
        )
        if self._was_read is not None:
            self._was_read.record()
        self._step = batch, limits


def _pages_of_rows(seq_lens: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
    """Return on the host where each row's pages start, [num_rows + 1], and the keys of its last page, [num_rows]."""
    last_page_len = [(seq_len - 1) % block_size + 1 for seq_len in seq_lens]
    num_pages = [-(-seq_len // block_size) for seq_len in seq_lens]
    return _starts(num_pages), torch.tensor(last_page_len, dtype=torch.int32)


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)


def _page_indices(batch: AttentionBatch, block_size: int, *, num_pages: int) -> Tensor:
    """Return [num_pages] int32, the blocks of all rows in order, on the device and without waiting for it."""
    pages_of_row = (batch.seq_lens.long() + (block_size - 1)) // block_size
    rows = torch.repeat_interleave(pages_of_row, output_size=num_pages)
    starts = pages_of_row.cumsum(0) - pages_of_row
    columns = torch.arange(num_pages, device=rows.device) - starts[rows]
    return batch.block_tables[rows, columns]
