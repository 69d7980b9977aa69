"""Kernels that do little but load and store, as a fraction of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_figures.attention import BLOCK_SIZE
from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import Measured, Row
from triptych_kernels.ops import rms_norm, rotary_and_write_kv, silu_and_mul

_MAX_POSITION = 8192


def elementwise_rows(bench: Bench) -> Iterator[Row]:
    """At the widths of the model, for a step of decodes and one of prompts."""
    for num_tokens in bench.sizes.token_counts:
        for name, measure in (
            ("rms_norm with residual", measure_rms_norm),
            ("rotary and KV write", measure_rotary),
            ("silu_and_mul", measure_silu),
        ):
            yield Row("elementwise", f"{name}, {num_tokens:,} tokens", partial(measure, bench, num_tokens))


def measure_rms_norm(bench: Bench, num_tokens: int) -> Measured:
    width = bench.sizes.hidden_size
    num_bytes = num_tokens * width * (2 + 4 + 2 + 4)  # x, residual; the normalised, the next residual
    weight = bench.normal(width)
    operands = [
        (bench.normal(num_tokens, width), bench.normal(num_tokens, width).float())
        for _ in range(bench.num_copies(num_bytes))
    ]
    timing = bench.time([partial(rms_norm, x, weight, 1e-5, residual) for x, residual in operands])
    return bench.as_bandwidth(timing, num_bytes)


def measure_rotary(bench: Bench, num_tokens: int) -> Measured:
    sizes, device = bench.sizes, bench.device
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    # heads read and written, a row of cosines and sines, position and slot
    token_bytes = 2 * (num_heads + 2 * num_kv_heads) * head_dim * 2 + head_dim * 4 + 16
    table = torch.randn(_MAX_POSITION, head_dim, device=device)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    calls = []
    for _ in range(bench.num_copies(num_tokens * token_bytes)):
        heads = bench.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        calls.append(
            partial(
                rotary_and_write_kv,
                query,
                key,
                value,
                torch.randint(_MAX_POSITION, (num_tokens,), device=device),
                table,
                bench.normal(num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim),
                torch.randperm(num_tokens, device=device) + BLOCK_SIZE,
            )
        )
    return bench.as_bandwidth(bench.time(calls), num_tokens * token_bytes)


def measure_silu(bench: Bench, num_tokens: int) -> Measured:
    width = bench.sizes.intermediate_size
    num_bytes = num_tokens * width * (2 * 2 + 2)
    operands = [bench.normal(num_tokens, 2 * width) for _ in range(bench.num_copies(num_bytes))]
    return bench.as_bandwidth(bench.time([partial(silu_and_mul, x) for x in operands]), num_bytes)
