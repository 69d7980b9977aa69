"""Kernels that move data, as fractions of the device's limits: attention, sampling, elementwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.timing import Bench, Row
from benchmarks.harness.figures import Figure
from benchmarks.kernels.attention_step import BLOCK_SIZE, AttentionStep, attention_operations, build_step
from benchmarks.kernels.sampling import sampling_calls
from triptych_kernels.ops import rms_norm, rotary_and_write_kv, silu_and_mul

_MAX_LAYERS = 64
_MAX_POSITION = 8192
_LOGITS_DEVIATION = 3.0  # a few hundred tokens hold most of the probability
_NAME_TO_DTYPE = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


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
    chosen = calls[0]()
    if isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and (chosen < 0).any():
        raise ValueError("a row of finite logits found no token")
    timing = bench.time(calls)
    read_s = logits_bytes / bench.bandwidth
    samples = tuple(sample_s / read_s for sample_s in timing.seconds)
    return Figure("", "reads of the logits", samples, 1.0, less_is_better=True, note=timing.note)


def decode_rows(bench: Bench, cache_dtypes: Sequence[str]) -> Iterator[Row]:
    """Yield decodes of every batch and context as fractions of the copy bandwidth."""
    for name in cache_dtypes:
        for context in bench.sizes.contexts:
            for batch in bench.sizes.batches:
                title = f"attention: decode, {name} KV, {batch} x {context:,}"
                yield Row(title, partial(measure_decode, bench, batch, context, _NAME_TO_DTYPE[name]))


def prefill_rows(bench: Bench) -> Iterator[Row]:
    """Yield prompts as fractions of the matrix rate, ours and torch's own."""
    for length in bench.sizes.prefills:
        yield Row(f"attention: prefill, {length:,}", partial(measure_prefill, bench, length))
        yield Row(
            f"attention: prefill, {length:,}, torch's own", partial(measure_torch_prefill, bench, length)
        )


def measure_decode(bench: Bench, batch: int, context: int, dtype: torch.dtype) -> Figure:
    step = _step(bench, batch, 1, context, dtype)
    return bench.as_bandwidth(bench.time(_attention_calls(step)), step.kv_bytes + 2 * step.query.nbytes)


def measure_prefill(bench: Bench, length: int) -> Figure:
    step = _step(bench, 1, length, length, bench.dtype)
    return bench.as_matrix_rate(bench.time(_attention_calls(step)), step.operations)


def measure_torch_prefill(bench: Bench, length: int) -> Figure:
    """Return the same over contiguous keys and values, by whatever torch chooses."""
    heads = bench.sizes.heads
    query = bench.normal(1, heads.num_heads, length, heads.head_dim)
    key, value = (bench.normal(1, heads.num_kv_heads, length, heads.head_dim) for _ in range(2))
    operations = attention_operations(heads.num_heads * heads.head_dim, length, length)
    attend = partial(scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
    return bench.as_matrix_rate(bench.time([attend]), operations)


def _step(bench: Bench, num_rows: int, query_len: int, num_keys: int, dtype: torch.dtype) -> AttentionStep:
    sizes = bench.sizes
    return build_step(
        sizes.heads, num_rows, query_len, num_keys, dtype, bench.device,
        uncached_bytes=sizes.uncached_bytes, max_layers=_MAX_LAYERS,
    )  # fmt: skip


def _attention_calls(step: AttentionStep) -> list[Callable[[], Tensor]]:
    if not step.attend(0).isfinite().all():
        raise ValueError("attention over finite keys and values gave NaN or infinity")
    return [partial(step.attend, layer) for layer in range(len(step.kv_caches))]


def elementwise_rows(bench: Bench) -> Iterator[Row]:
    """Yield kernels at the widths of the model, for a step of decodes and one of prompts."""
    for num_tokens in bench.sizes.token_counts:
        for name, measure in (
            ("rms_norm with residual", measure_rms_norm),
            ("rotary and KV write", measure_rotary),
            ("silu_and_mul", measure_silu),
        ):
            yield Row(f"elementwise: {name}, {num_tokens:,} tokens", partial(measure, bench, num_tokens))


def measure_rms_norm(bench: Bench, num_tokens: int) -> Figure:
    width = bench.sizes.hidden_size
    num_bytes = num_tokens * width * (2 + 4 + 2 + 4)  # x, residual; the normalised, the next residual
    weight = bench.normal(width)
    operands = [
        (bench.normal(num_tokens, width), bench.normal(num_tokens, width).float())
        for _ in range(bench.num_copies(num_bytes))
    ]
    timing = bench.time([partial(rms_norm, x, weight, 1e-5, residual) for x, residual in operands])
    return bench.as_bandwidth(timing, num_bytes)


def measure_rotary(bench: Bench, num_tokens: int) -> Figure:
    heads, device = bench.sizes.heads, bench.device
    num_all_heads = heads.num_heads + 2 * heads.num_kv_heads
    # heads read and written, a row of cosines and sines, position and slot
    num_bytes = num_tokens * (2 * num_all_heads * heads.head_dim * 2 + heads.head_dim * 4 + 16)
    table = torch.randn(_MAX_POSITION, heads.head_dim, device=device)
    cache_shape = (-(-num_tokens // BLOCK_SIZE) + 1, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    calls = []
    for _ in range(bench.num_copies(num_bytes)):
        packed = bench.normal(num_tokens, num_all_heads, heads.head_dim)
        query, key, value = packed.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        positions = torch.randint(_MAX_POSITION, (num_tokens,), device=device)
        slots = torch.randperm(num_tokens, device=device) + BLOCK_SIZE
        cache = bench.normal(*cache_shape)
        calls.append(partial(rotary_and_write_kv, query, key, value, positions, table, cache, slots))
    return bench.as_bandwidth(bench.time(calls), num_bytes)


def measure_silu(bench: Bench, num_tokens: int) -> Figure:
    width = bench.sizes.intermediate_size
    num_bytes = num_tokens * width * (2 * 2 + 2)
    operands = [bench.normal(num_tokens, 2 * width) for _ in range(bench.num_copies(num_bytes))]
    return bench.as_bandwidth(bench.time([partial(silu_and_mul, x) for x in operands]), num_bytes)
