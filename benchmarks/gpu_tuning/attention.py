"""Workloads of paged attention: decodes of few and of many rows, and prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_figures.attention import build_step
from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import REAL
from benchmarks.gpu_tuning.workload import UNCACHED_BYTES, Workload
from triptych_kernels.ops import paged_attention

DECODES = (1, 8192), (16, 8192), (256, 1024)
"""Rows and keys of each: one stream, some, a full batch."""
PROMPTS = (1, 4096), (8, 512)
_HEADS = {64: (3, 3), 128: (8, 4), 256: (4, 2)}
"""Head_dim -> key heads and query heads of each: SmolLM2-135M's, Llama-3.1-8B's, Gemma-2-2B's."""


def decode_workloads(
    head_dim: int,
    kv_dtype: torch.dtype,
    block_m: int,
    *,
    device: torch.device,
    loads: tuple[tuple[int, int], ...] = DECODES,
) -> list[Workload]:
    """Of `paged_attention_decode`."""
    num_kv_heads, group = _HEADS.get(head_dim, (8, 4))
    if block_m > 16:
        group = block_m
    bench = _bench(device, head_dim, num_kv_heads, group)
    return [
        _workload(bench, rows, 1, keys, kv_dtype, f"{rows} rows of {keys:,} keys") for rows, keys in loads
    ]


def prefill_workloads(
    head_dim: int,
    kv_dtype: torch.dtype,
    *,
    device: torch.device,
    loads: tuple[tuple[int, int], ...] = PROMPTS,
) -> list[Workload]:
    """Of `paged_attention_prefill`."""
    bench = _bench(device, head_dim, *_HEADS.get(head_dim, (8, 4)))
    return [
        _workload(bench, rows, tokens, tokens, kv_dtype, f"{rows} prompts of {tokens:,} tokens")
        for rows, tokens in loads
    ]


def _bench(device: torch.device, head_dim: int, num_kv_heads: int, group: int) -> Bench:
    sizes = replace(
        REAL,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        uncached_bytes=0 if device.type == "meta" else UNCACHED_BYTES,
    )
    return Bench(device, sizes)


def _workload(
    bench: Bench, rows: int, query_len: int, num_keys: int, kv_dtype: torch.dtype, name: str
) -> Workload:
    step = build_step(bench, rows, query_len, num_keys, kv_dtype)
    calls = [
        partial(
            paged_attention,
            step.query,
            kv_cache,
            step.block_tables,
            step.query_starts,
            step.seq_lens,
            bench.sizes.head_dim**-0.5,
            kv_scales=kv_scales,
            query_lens_list=(query_len,) * rows,
            seq_lens_list=(num_keys,) * rows,
            impl="triton",
        )
        for kv_cache, kv_scales in step.kv_caches
    ]
    return Workload(name, calls)
