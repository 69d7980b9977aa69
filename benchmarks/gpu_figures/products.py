"""One layer's products with cold weights, plain, quantized and of experts, beside the nearer of two limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_figures.few_rows import few_rows_rows
from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import Measured, Row
from benchmarks.gpu_figures.timing import Call
from triptych_kernels.ops import fused_moe, gated_linear, linear
from triptych_kernels.ops.moe import ExpertWeights
from triptych_kernels.weights.base import LinearWeight

_NUM_EXPERTS, _TOP_K = 8, 2  # Mixtral's


def product_rows(bench: Bench) -> Iterator[Row]:
    """Of single tokens, of a full batch of decodes, of a step of prompts."""
    sizes, on_cuda = bench.sizes, bench.device.type == "cuda"
    quantized: dict[str, Callable[[Bench, int, int], LinearWeight]] = {
        "w4a16": _group_quantized,
        "w8a8 int8": partial(_channel_quantized, torch.int8),
        "w8a8 fp8": partial(_channel_quantized, torch.float8_e4m3fn),
    }
    quantized_experts: dict[str, Callable[..., Sequence[LinearWeight]]] = {
        "w4a16": _group_quantized_experts,
        "w8a8 int8": partial(_channel_quantized_experts, torch.int8),
        "w8a8 fp8": partial(_channel_quantized_experts, torch.float8_e4m3fn),
    }
    for num_tokens in (1, *sizes.token_counts):
        tokens = f"{num_tokens:,} tokens"
        yield Row("products", f"down, bf16, {tokens}", partial(measure_down, bench, num_tokens))
        yield Row("products", f"gate and up, bf16, {tokens}", partial(measure_gated, bench, num_tokens))
        for name, create in quantized.items() if on_cuda else ():
            yield Row("products", f"down, {name}, {tokens}", partial(measure_held, bench, create, num_tokens))
        yield Row("products", f"experts, bf16, {tokens}", partial(measure_experts, bench, num_tokens))
        for name, stack in quantized_experts.items() if on_cuda else ():
            title = f"experts, {name}, {tokens}"
            yield Row("products", title, partial(measure_held_experts, bench, stack, num_tokens))
    if on_cuda:
        yield from few_rows_rows(bench)


def measure_down(bench: Bench, num_tokens: int) -> Measured:
    sizes = bench.sizes
    return _measure_plain(bench, num_tokens, sizes.intermediate_size, sizes.hidden_size, linear)


def measure_gated(bench: Bench, num_tokens: int) -> Measured:
    """With its activation."""
    sizes = bench.sizes
    return _measure_plain(bench, num_tokens, sizes.hidden_size, 2 * sizes.intermediate_size, gated_linear)


def measure_held(
    bench: Bench, create: Callable[[Bench, int, int], LinearWeight], num_tokens: int
) -> Measured:
    """The arithmetic is compared with the rate of bfloat16; 8-bit products may pass it."""
    in_features, out_features = bench.sizes.intermediate_size, bench.sizes.hidden_size
    first = create(bench, out_features, in_features)
    copies = bench.num_copies(first.num_bytes) - 1
    weights = [first, *(create(bench, out_features, in_features) for _ in range(copies))]
    x = bench.normal(num_tokens, in_features)
    calls = [partial(linear, x, weight) for weight in weights]
    return _measure(bench, calls, first.num_bytes, 2.0 * num_tokens * in_features * out_features)


def measure_experts(bench: Bench, num_tokens: int) -> Measured:
    """The whole MLP of a mixture: routing, both products, the weighted sum. Of few tokens not all experts are read."""
    sizes = bench.sizes
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    expert_bytes = 2 * 3 * hidden * inner
    weights = [
        (bench.normal(_NUM_EXPERTS, 2 * inner, hidden), bench.normal(_NUM_EXPERTS, hidden, inner))
        for _ in range(bench.num_copies(_NUM_EXPERTS * expert_bytes))
    ]
    return _measure_mixtures(bench, weights, expert_bytes, num_tokens)


def measure_held_experts(
    bench: Bench, create: Callable[..., Sequence[LinearWeight]], num_tokens: int
) -> Measured:
    """The same with quantized experts.

    Args:
        create: from out_features, in_features and whether it is gated, one product's weights of all experts.
    """
    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size

    def create_both() -> tuple[Sequence[LinearWeight], Sequence[LinearWeight]]:
        return create(bench, 2 * inner, hidden, gated=True), create(bench, hidden, inner, gated=False)

    first = create_both()
    expert_bytes = sum(stack[0].num_bytes for stack in first)
    copies = bench.num_copies(_NUM_EXPERTS * expert_bytes) - 1
    return _measure_mixtures(
        bench, [first, *(create_both() for _ in range(copies))], expert_bytes, num_tokens
    )


def _measure_mixtures(
    bench: Bench, weights: Sequence[tuple[ExpertWeights, ExpertWeights]], expert_bytes: int, num_tokens: int
) -> Measured:
    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size
    x, router = bench.normal(num_tokens, hidden), bench.normal(num_tokens, _NUM_EXPERTS)
    calls = [partial(fused_moe, x, router, w13, w2, top_k=_TOP_K) for w13, w2 in weights]
    num_read = int(router.float().topk(_TOP_K).indices.unique().numel())
    operations = 2.0 * num_tokens * _TOP_K * 3 * hidden * inner
    return _measure(bench, calls, num_read * expert_bytes, operations)


def _measure_plain(
    bench: Bench,
    num_tokens: int,
    in_features: int,
    out_features: int,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Measured:
    weight_bytes = 2 * in_features * out_features
    weights = [bench.normal(out_features, in_features) for _ in range(bench.num_copies(weight_bytes))]
    x = bench.normal(num_tokens, in_features)
    calls = [partial(multiply, x, weight) for weight in weights]
    return _measure(bench, calls, weight_bytes, 2.0 * num_tokens * in_features * out_features)


def _measure(bench: Bench, calls: Sequence[Call], weight_bytes: int, operations: float) -> Measured:
    """Beside the limit that is nearer: the time to read the weights, or that of the arithmetic."""
    timing = bench.time(calls)
    if operations / bench.matrix_rate > weight_bytes / bench.bandwidth:
        return bench.as_matrix_rate(timing, operations)
    return bench.as_bandwidth(timing, weight_bytes)


def _group_quantized(bench: Bench, out_features: int, in_features: int) -> LinearWeight:
    # where there is no such kernel its rows say so, and no other does
    from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
    from triptych_kernels.weights.formats import BLOCK_FORMATS

    weight = GroupQuantizedWeight(
        out_features, in_features, bench.dtype, BLOCK_FORMATS["Q4_0"], device=bench.device
    )
    weight.fill_rows(0, bench.normal(out_features, in_features).float())
    return weight


def _channel_quantized(
    element_dtype: torch.dtype, bench: Bench, out_features: int, in_features: int
) -> LinearWeight:
    from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight

    weight = ChannelQuantizedWeight(
        out_features, in_features, bench.dtype, element_dtype, device=bench.device
    )
    weight.fill_rows(0, bench.normal(out_features, in_features))
    return weight


def _group_quantized_experts(
    bench: Bench, out_features: int, in_features: int, *, gated: bool
) -> Sequence[LinearWeight]:
    from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
    from triptych_kernels.weights.formats import BLOCK_FORMATS

    shape = (_NUM_EXPERTS, out_features, in_features)
    stack = GroupQuantizedExperts(
        *shape, bench.dtype, BLOCK_FORMATS["Q4_0"], device=bench.device, gated=gated
    )
    return _filled(bench, stack)


def _channel_quantized_experts(
    element_dtype: torch.dtype, bench: Bench, out_features: int, in_features: int, *, gated: bool
) -> Sequence[LinearWeight]:
    from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts

    shape = (_NUM_EXPERTS, out_features, in_features)
    stack = ChannelQuantizedExperts(*shape, bench.dtype, element_dtype, device=bench.device, gated=gated)
    return _filled(bench, stack)


def _filled(bench: Bench, stack: Sequence[LinearWeight]) -> Sequence[LinearWeight]:
    for weight in stack:
        weight.fill_rows(0, bench.normal(*weight.shape).float())
    return stack
