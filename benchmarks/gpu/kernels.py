"""Kernels that move data, as fractions of the device's limits: attention and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.timing import Bench, Row
from benchmarks.harness.figures import Figure
from benchmarks.kernels.attention_step import build_step
from benchmarks.kernels.sampling import sampling_calls

_LOGITS_DEVIATION = 3.0  # a few hundred tokens hold most of the probability


def limit_rows(bench: Bench) -> Iterator[Row]:
    sizes = bench.sizes
    yield Row(f"limits: copy of {sizes.copy_bytes:,} bytes, read + written", lambda: bench.copied)
    yield Row(f"limits: bf16 product of {sizes.matrix:,} x {sizes.matrix:,}", lambda: bench.multiplied)


def sampling_rows(bench: Bench) -> Iterator[Row]:
    """Yield each way to choose tokens; all rows of a step ask for the same."""
    num_rows, vocab_size = bench.sizes.sampling_rows, bench.sizes.vocab_size
    for name in sampling_calls(torch.zeros(1, 2)):
        yield Row(f"sampling: {name}, {num_rows} x {vocab_size:,}", partial(measure_sampling, bench, name))


def measure_sampling(bench: Bench, name: str) -> Figure:
    """Return the time as a multiple of the time that one read of the logits takes."""
    shape = bench.sizes.sampling_rows, bench.sizes.vocab_size
    logits_bytes = 4 * shape[0] * shape[1]
    copies = [
        torch.randn(shape, device=bench.device) * _LOGITS_DEVIATION
        for _ in range(bench.num_copies(logits_bytes))
    ]
    calls = [sampling_calls(logits)[name] for logits in copies]
    timing = bench.time(calls)
    read_s = logits_bytes / bench.bandwidth
    samples = tuple(sample_s / read_s for sample_s in timing.samples)
    return Figure("", "reads of the logits", samples, 1.0, less_is_better=True, note=timing.note)


def attention_rows(bench: Bench) -> Iterator[Row]:
    """Yield decodes of every batch and context, then whole prompts."""
    for context in bench.sizes.contexts:
        for batch in bench.sizes.batches:
            title = f"attention: decode, bf16 KV, {batch} x {context:,}"
            yield Row(title, partial(measure_attention, bench, batch, 1, context))
    for length in bench.sizes.prefills:
        yield Row(f"attention: prefill, {length:,}", partial(measure_attention, bench, 1, length, length))


def measure_attention(bench: Bench, num_rows: int, query_len: int, num_keys: int) -> Figure:
    """Return a decode's fraction of the copy bandwidth, and a prompt's of the matrix rate."""
    step = build_step(
        bench.sizes.heads, num_rows, query_len, num_keys, bench.dtype, bench.device,
        uncached_bytes=bench.sizes.uncached_bytes,
    )  # fmt: skip
    timing = bench.time([partial(step.attend, layer) for layer in range(len(step.kv_caches))])
    if query_len == 1:
        return bench.as_bandwidth(timing, step.kv_bytes + 2 * step.query.nbytes)
    return bench.as_matrix_rate(timing, step.operations)
