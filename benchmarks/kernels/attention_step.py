"""One step of paged attention over random keys and values, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import paged_attention

BLOCK_SIZE = 16
_MAX_LAYERS = 1000
_FILL_ELEMENTS = 1 << 28  # elements of float32 from which a cache is filled at a time: 1 GiB


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """Operands of one attention call, over several layers. All rows are alike."""

    query: Tensor
    """[num_rows * query_len, num_heads, head_dim]"""
    kv_caches: list[tuple[Tensor, Tensor | None]]
    """Keys and values of each layer, with their scales."""
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    query_len: int
    num_keys: int

    @property
    def num_rows(self) -> int:
        return len(self.block_tables)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and scales that one layer's call reads."""
        kv_cache, kv_scales = self.kv_caches[0]
        vector_bytes = kv_cache.shape[4] * kv_cache.itemsize + (
            0 if kv_scales is None else kv_scales.itemsize
        )
        return self.num_rows * self.num_keys * 2 * kv_cache.shape[2] * vector_bytes

    @property
    def operations(self) -> float:
        """Operations of one layer: a multiplication and an addition for each score and each weighted value."""
        _, num_heads, head_dim = self.query.shape
        # each query sees all keys before it
        num_seen = (
            self.query_len * (self.num_keys - self.query_len) + self.query_len * (self.query_len + 1) / 2
        )
        return self.num_rows * 4.0 * num_heads * head_dim * num_seen

    def attend(self, layer: int, impl: str | None = None) -> Tensor:
        """Compute one layer; [num_rows * query_len, num_heads, head_dim]."""
        kv_cache, kv_scales = self.kv_caches[layer]
        return paged_attention(
            self.query,
            kv_cache,
            self.block_tables,
            self.query_starts,
            self.seq_lens,
            AttendOptions(self.query.shape[2] ** -0.5),
            kv_scales=kv_scales,
            query_lens_list=(self.query_len,) * self.num_rows,
            seq_lens_list=(self.num_keys,) * self.num_rows,
            impl=impl,
        )


def build_step(
    heads: Heads,
    num_rows: int,
    query_len: int,
    num_keys: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    *,
    uncached_bytes: int,
) -> AttentionStep:
    """Return a step; the blocks of its rows lie anywhere in the cache, as after some hours of service.

    Args:
        uncached_bytes: Size of all layers' caches together, at least, unless those are 1,000 layers.
    """
    blocks_each = -(-num_keys // BLOCK_SIZE)
    num_blocks = num_rows * blocks_each
    shape = (num_blocks + 1, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    layer_bytes = torch.Size(shape).numel() * cache_dtype.itemsize
    num_layers = min(max(-(-uncached_bytes // layer_bytes), 1), _MAX_LAYERS)
    query_dtype = torch.bfloat16 if cache_dtype in LARGEST_ELEMENT else cache_dtype
    packed = torch.empty(
        (num_rows * query_len, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim),
        dtype=query_dtype,
        device=device,
    )
    return AttentionStep(
        packed.normal_()[:, : heads.num_heads],  # a view of the packed projection, as in a model
        [random_cache(shape, cache_dtype, device) for _ in range(num_layers)],
        (torch.randperm(num_blocks, device=device) + 1).view(num_rows, blocks_each).int(),
        torch.arange(num_rows + 1, dtype=torch.int32, device=device) * query_len,
        torch.full((num_rows,), num_keys, dtype=torch.int32, device=device),
        query_len,
        num_keys,
    )


def random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return normal keys and values, and scales if they have 8 bits; on a CPU in huge pages, as a worker's.

    Args:
        shape: [num_blocks, 2, num_kv_heads, block_size, head_dim]; scales have all but the last.
    """
    cache = _empty(shape, dtype, device)
    if dtype not in LARGEST_ELEMENT:
        return cache.normal_(), None
    largest = LARGEST_ELEMENT[dtype]
    blocks_at_once = max(_FILL_ELEMENTS // cache[0].numel(), 1)
    for part in cache.split(blocks_at_once):
        part.copy_((torch.randn(part.shape, device=device) * (largest / 4)).clamp_(-largest, largest))
    return cache, _empty(shape[:4], torch.float32, device).fill_(4 / largest)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
