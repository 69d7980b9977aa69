"""Which choices are worth the time, most valuable first: the shapes of the models that are served most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_tuning import experts, products
from benchmarks.gpu_tuning.attention import decode_workloads, prefill_workloads
from benchmarks.gpu_tuning.workload import Case, Workload
from triptych_kernels.triton.attention import plan as paged_attention_plan
from triptych_kernels.triton.linear import few_rows, quantized_linear, w8a8_linear
from triptych_kernels.triton.moe import fused_moe, quantized_experts, w8a8_experts
from triptych_kernels.triton.tuning.tunable import ROW_BUCKETS, KeyValue, Tunable

_TUNABLE_TO_WORKLOADS: dict[Tunable[Any], Callable[..., list[Workload]]] = {
    paged_attention_plan.DECODE: decode_workloads,
    paged_attention_plan.PREFILL: prefill_workloads,
    few_rows.LINEAR: partial(products.few_rows_workloads, is_gated=False),
    few_rows.GATED_LINEAR: partial(products.few_rows_workloads, is_gated=True),
    quantized_linear.BY_INTEGERS: partial(products.group_workloads, batch_invariant=True),
    quantized_linear.BY_WEIGHTS: partial(products.group_workloads, batch_invariant=False),
    w8a8_linear.TILES: products.channel_workloads,
    fused_moe.GATE_UP: experts.plain_workloads,
    fused_moe.DOWN: experts.plain_workloads,
    quantized_experts.BY_INTEGERS: partial(experts.group_workloads, batch_invariant=True),
    quantized_experts.BY_WEIGHTS: partial(experts.group_workloads, batch_invariant=False),
    w8a8_experts.TILES: experts.channel_workloads,
}
NAME_TO_TUNABLE: dict[str, Tunable[Any]] = {tunable.name: tunable for tunable in _TUNABLE_TO_WORKLOADS}
"""All that there are."""

_BFLOAT16, _INT8, _FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn

# (out_features, in_features) of one layer's products: of query, key and value; of attention's output; of gate and up;
# of down
_LLAMA_8B = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
_QWEN3_06B = (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)
_HEADS = (128256, 4096), (151936, 1024)  # of both
_MIXTRAL = 8, 4096, 14336  # num_experts, hidden_size, intermediate_size
_FEW_ROWS, _PROMPT, _OTHERS = (16, 64), (4096,), (32, 128, 512)
assert {*_FEW_ROWS, *_PROMPT, *_OTHERS} == {*ROW_BUCKETS}
_WEIGHTS = (4, True), (8, False)
"""Bits, and whether there are minimums, as the loader quantizes."""


def create_case(name: str, key: tuple[KeyValue, ...]) -> Case:
    """The choice of this kernel at this key."""
    tunable = NAME_TO_TUNABLE[name]
    workloads = _TUNABLE_TO_WORKLOADS[tunable]
    return Case(tunable, key, lambda device: workloads(*key, device=device))


def all_cases(compute_capability: tuple[int, int]) -> Iterator[Case]:
    """Of a device that can do so much, most valuable first."""
    elements = (_FLOAT8, _INT8) if compute_capability >= (8, 9) else (_INT8,)
    single, *several = few_rows.FEW_ROWS
    yield from _few_rows_cases(single)
    for head_dim, kv_dtype in ((128, _BFLOAT16), (64, _BFLOAT16), *((128, element) for element in elements)):
        yield create_case("paged_attention_decode", (head_dim, kv_dtype, 16))
        yield create_case("paged_attention_prefill", (head_dim, kv_dtype))
    for buckets, shapes in (
        (_FEW_ROWS, _LLAMA_8B),
        (_PROMPT, _LLAMA_8B),
        (_FEW_ROWS, _QWEN3_06B),
        (_PROMPT, _QWEN3_06B),
    ):
        yield from _linear_cases(buckets, shapes, elements)
    yield from _expert_cases((*_FEW_ROWS, *_PROMPT), elements)
    for rows in several:
        yield from _few_rows_cases(rows)
    yield from _linear_cases(_OTHERS, (*_LLAMA_8B, *_QWEN3_06B), elements)
    yield from _expert_cases(_OTHERS, elements)


def _few_rows_cases(rows: int) -> Iterator[Case]:
    for (attention_in, attention_out, gate_up, down), head in zip(
        (_LLAMA_8B, _QWEN3_06B), _HEADS, strict=True
    ):
        yield create_case("gated_linear_few_rows", (*gate_up, _BFLOAT16, rows))
        for shape in (down, attention_in, attention_out, head):
            yield create_case("linear_few_rows", (*shape, _BFLOAT16, rows))


def _linear_cases(
    buckets: tuple[int, ...], shapes: tuple[tuple[int, int], ...], elements: tuple[torch.dtype, ...]
) -> Iterator[Case]:
    for rows, shape in product(buckets, shapes):
        for bits, is_affine in _WEIGHTS:
            yield create_case("quantized_linear", (*shape, bits, is_affine, rows))
            if rows >= quantized_linear.WIDE_ROWS:
                yield create_case("quantized_linear_by_weights", (*shape, bits, is_affine, rows))
        for element in elements:
            yield create_case("w8a8_linear", (*shape, element, rows))


def _expert_cases(buckets: tuple[int, ...], elements: tuple[torch.dtype, ...]) -> Iterator[Case]:
    num_experts, hidden_size, inner = _MIXTRAL
    for rows in buckets:
        yield create_case("fused_moe_gate_up", (*_MIXTRAL, rows))
        yield create_case("fused_moe_down", (*_MIXTRAL, rows))
        for shape in ((2 * inner, hidden_size, True), (hidden_size, inner, False)):
            for bits, is_affine in _WEIGHTS:
                yield create_case("quantized_experts", (num_experts, *shape, bits, is_affine, rows))
                if rows >= quantized_linear.WIDE_ROWS:
                    yield create_case(
                        "quantized_experts_by_weights", (num_experts, *shape, bits, is_affine, rows)
                    )
            for element in elements:
                yield create_case("w8a8_experts", (num_experts, *shape, element, rows))
