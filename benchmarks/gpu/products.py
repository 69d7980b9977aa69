"""One layer's products with cold weights, plain, quantized and of experts, beside the nearer of two limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import Bench, Call, Row
from benchmarks.harness.figures import Figure
from triptych_kernels.ops import fused_moe, gated_linear, linear
from triptych_kernels.weights.formats import BLOCK_FORMATS

_NUM_EXPERTS, _TOP_K = 8, 2  # Mixtral's
_QUANTIZED = ("w4a16", "w8a8 int8", "w8a8 fp8")


def product_rows(bench: Bench) -> Iterator[Row]:
    """Yield products of a single token, of a full batch of decodes, and of a step of prompts."""
    forms = ("bf16", *(_QUANTIZED if bench.device.type == "cuda" else ()))
    for num_tokens in (1, *bench.sizes.token_counts):
        tokens = f"{num_tokens:,} tokens"
        yield Row(f"products: gate and up, bf16, {tokens}", partial(measure_gate_up, bench, num_tokens))
        for form in forms:
            yield Row(f"products: down, {form}, {tokens}", partial(measure_down, bench, form, num_tokens))
            title = f"products: experts, {form}, {tokens}"
            yield Row(title, partial(measure_experts, bench, form, num_tokens))


def measure_gate_up(bench: Bench, num_tokens: int) -> Figure:
    """Measure both projections and their activation."""
    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size
    x = bench.normal(num_tokens, hidden)
    operations = 2.0 * num_tokens * hidden * 2 * inner
    return _measure(bench, lambda: bench.normal(2 * inner, hidden), partial(gated_linear, x), operations)


def measure_down(bench: Bench, form: str, num_tokens: int) -> Figure:
    """Measure one projection. Arithmetic is compared with the rate of bfloat16; 8-bit products may pass it."""
    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size
    x = bench.normal(num_tokens, inner)
    operations = 2.0 * num_tokens * hidden * inner
    return _measure(bench, lambda: _weight(bench, form, hidden, inner), partial(linear, x), operations)


def measure_experts(bench: Bench, form: str, num_tokens: int) -> Figure:
    """Measure the whole MLP of a mixture: routing, both products, the weighted sum."""
    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size
    x, router = bench.normal(num_tokens, hidden), bench.normal(num_tokens, _NUM_EXPERTS)

    def create() -> tuple[Any, Any]:
        gate_up = _experts(bench, form, (_NUM_EXPERTS, 2 * inner, hidden), gated=True)
        return gate_up, _experts(bench, form, (_NUM_EXPERTS, hidden, inner), gated=False)

    def compute(weights: tuple[Any, Any]) -> object:
        return fused_moe(x, router, *weights, top_k=_TOP_K)

    num_read = router.float().topk(_TOP_K).indices.unique().numel()  # few tokens do not reach all experts
    operations = 2.0 * num_tokens * _TOP_K * 3 * hidden * inner
    return _measure(bench, create, compute, operations, read_fraction=num_read / _NUM_EXPERTS)


def _measure(
    bench: Bench,
    create: Callable[[], Any],
    compute: Callable[[Any], object],
    operations: float,
    *,
    read_fraction: float = 1.0,
) -> Figure:
    """Return the rate beside the nearer limit: that of reading the weights, or that of the arithmetic.

    Args:
        create: Draws the weights of one call.
        read_fraction: Part of those weights that a call reads.
    """
    first = create()
    num_bytes = _num_bytes(first)
    weights = [first, *(create() for _ in range(bench.num_copies(num_bytes) - 1))]
    calls: list[Call] = [partial(compute, weight) for weight in weights]
    timing = bench.time(calls)
    read_bytes = int(num_bytes * read_fraction)
    if operations / bench.matrix_rate > read_bytes / bench.bandwidth:
        return bench.as_matrix_rate(timing, operations)
    return bench.as_bandwidth(timing, read_bytes)


def _num_bytes(weight: Any) -> int:
    """Return the size of a tensor, a quantized weight, or several of them."""
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return int(weight.num_bytes) if hasattr(weight, "num_bytes") else sum(map(_num_bytes, weight))


def _weight(bench: Bench, form: str, out_features: int, in_features: int) -> Any:
    if form == "bf16":
        return bench.normal(out_features, in_features)
    from benchmarks.gpu import weights  # needs Triton, which a machine without a GPU may lack

    shape = (out_features, in_features)
    if form == "w4a16":
        return weights.group_weight(*shape, BLOCK_FORMATS["Q4_0"], bench.device)
    return weights.channel_weight(*shape, _element_dtype(form), bench.device)


def _experts(bench: Bench, form: str, shape: tuple[int, int, int], *, gated: bool) -> Any:
    if form == "bf16":
        return bench.normal(*shape)
    from benchmarks.gpu import weights

    if form == "w4a16":
        return weights.group_experts(shape, BLOCK_FORMATS["Q4_0"], bench.device, gated=gated)
    return weights.channel_experts(shape, _element_dtype(form), bench.device, gated=gated)


def _element_dtype(form: str) -> torch.dtype:
    return torch.int8 if form.endswith("int8") else torch.float8_e4m3fn
