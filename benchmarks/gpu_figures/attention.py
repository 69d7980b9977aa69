"""Paged attention: decodes as a fraction of the copy bandwidth, prompts of the matrix rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import Measured, Row
from benchmarks.gpu_figures.timing import Timing
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import paged_attention

BLOCK_SIZE = 16
_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FILL_ELEMENTS = 1 << 28  # of the float32 from which a cache is filled at a time: 1 GiB


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Rows of one attention call, over as many layers as no cache holds."""

    query: Tensor
    kv_caches: list[tuple[Tensor, Tensor | None]]
    """By layer, with its scales."""
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    query_len: int
    """Of each row."""
    num_keys: int
    """Of each row."""

    @property
    def num_rows(self) -> int:
        return len(self.block_tables)

    def attend(self, layer: int) -> Tensor:
        kv_cache, kv_scales = self.kv_caches[layer]
        return paged_attention(
            self.query,
            kv_cache,
            self.block_tables,
            self.query_starts,
            self.seq_lens,
            self.query.shape[2] ** -0.5,
            kv_scales=kv_scales,
            query_lens_list=(self.query_len,) * self.num_rows,
            seq_lens_list=(self.num_keys,) * self.num_rows,
        )


def attention_rows(bench: Bench) -> Iterator[Row]:
    """Decodes of every batch and context, then prompts."""
    sizes = bench.sizes
    for name, dtype in _DTYPES.items():
        if bench.device.type == "cpu" and dtype == torch.float8_e4m3fn:
            continue  # no kernel for CPUs reads it
        for context in sizes.contexts:
            for batch in sizes.batches:
                title = f"decode, {name} KV, {batch} x {context:,}"
                section = "8-bit attention" if dtype in LARGEST_ELEMENT else "attention"
                yield Row(section, title, partial(measure_decode, bench, batch, context, dtype))
    for length in sizes.prefills:
        yield Row("attention", f"prefill, {length:,}", partial(measure_prefill, bench, length))
        yield Row("attention", f"prefill, {length:,}, torch's own", partial(measure_torch, bench, length))


def measure_decode(bench: Bench, batch: int, context: int, dtype: torch.dtype) -> Measured:
    step = build_step(bench, batch, 1, context, dtype)
    timing = _time(bench, step)
    return bench.as_bandwidth(timing, _kv_bytes(step) + 2 * step.query.nbytes)


def measure_prefill(bench: Bench, length: int) -> Measured:
    step = build_step(bench, 1, length, length, bench.dtype)
    return bench.as_matrix_rate(_time(bench, step), causal_operations(bench, length))


def measure_torch(bench: Bench, length: int) -> Measured:
    """The same over contiguous keys and values, by whatever torch chooses: what others reach."""
    sizes = bench.sizes
    query = bench.normal(1, sizes.num_heads, length, sizes.head_dim)
    key, value = (bench.normal(1, sizes.num_kv_heads, length, sizes.head_dim) for _ in range(2))

    def attend() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return bench.as_matrix_rate(bench.time([attend]), causal_operations(bench, length))


def causal_operations(bench: Bench, length: int) -> float:
    """Of a prompt: a multiplication and an addition for each score that is seen and each weighted value."""
    return 4.0 * bench.sizes.num_heads * bench.sizes.head_dim * length * (length + 1) / 2


def build_step(bench: Bench, batch: int, query_len: int, num_keys: int, dtype: torch.dtype) -> Step:
    """Blocks of a row lie anywhere in the cache, as they do after some hours of service."""
    sizes, device = bench.sizes, bench.device
    blocks_each = -(-num_keys // BLOCK_SIZE)
    num_blocks = batch * blocks_each
    shape = (num_blocks + 1, 2, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim)
    layer_bytes = torch.Size(shape).numel() * dtype.itemsize
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    return Step(
        # a view of the packed projection, as in a model
        bench.normal(batch * query_len, heads, sizes.head_dim)[:, : sizes.num_heads],
        [random_cache(shape, dtype, device) for _ in range(bench.num_copies(layer_bytes))],
        (torch.randperm(num_blocks, device=device) + 1).view(batch, blocks_each).int(),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len,
        torch.full((batch,), num_keys, dtype=torch.int32, device=device),
        query_len,
        num_keys,
    )


def random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Normal keys and values [num_blocks, 2, num_kv_heads, block_size, head_dim], and scales where 8 bits need them."""
    cache = torch.empty(shape, dtype=dtype, device=device)
    if dtype not in LARGEST_ELEMENT:
        return cache.normal_(), None
    largest = LARGEST_ELEMENT[dtype]
    blocks_at_once = max(_FILL_ELEMENTS // cache[0].numel(), 1)
    for part in cache.split(blocks_at_once):
        part.copy_((torch.randn(part.shape, device=device) * (largest / 4)).clamp_(-largest, largest))
    return cache, torch.full(shape[:4], 4 / largest, device=device)


def _time(bench: Bench, step: Step) -> Timing:
    out = step.attend(0)
    if not out.isfinite().all():
        raise ValueError("attention over finite keys and values gave NaN or infinity")
    return bench.time([partial(step.attend, layer) for layer in range(len(step.kv_caches))])


def _kv_bytes(step: Step) -> int:
    """Of keys, values and scales that one layer's call reads."""
    kv_cache, kv_scales = step.kv_caches[0]
    vector_bytes = kv_cache.shape[4] * kv_cache.itemsize + (0 if kv_scales is None else kv_scales.itemsize)
    return step.num_rows * step.num_keys * 2 * kv_cache.shape[2] * vector_bytes
