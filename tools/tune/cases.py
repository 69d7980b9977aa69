"""The choices that are worth measuring, most valuable first: shapes of the models that are served most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from tools.tune import workloads
from tools.tune.workloads import Workload
from triptych_kernels.triton.attention import plan as paged_attention_plan
from triptych_kernels.triton.linear import few_rows, quantized_linear, w8a8_linear
from triptych_kernels.triton.moe import fused_moe, quantized_experts, w8a8_experts
from triptych_kernels.triton.tuning.tunable import ROW_BUCKETS, KeyValue, Tunable

_TUNABLE_TO_WORKLOADS: dict[Tunable[Any], Callable[..., list[Workload]]] = {
    paged_attention_plan.DECODE: workloads.decode_workloads,
    paged_attention_plan.PREFILL: workloads.prefill_workloads,
    few_rows.LINEAR: partial(workloads.few_rows_workloads, is_gated=False),
    few_rows.GATED_LINEAR: partial(workloads.few_rows_workloads, is_gated=True),
    quantized_linear.BY_INTEGERS: partial(workloads.group_workloads, batch_invariant=True),
    quantized_linear.BY_WEIGHTS: partial(workloads.group_workloads, batch_invariant=False),
    w8a8_linear.TILES: workloads.channel_workloads,
    fused_moe.GATE_UP: workloads.plain_expert_workloads,
    fused_moe.DOWN: workloads.plain_expert_workloads,
    quantized_experts.BY_INTEGERS: partial(workloads.group_expert_workloads, batch_invariant=True),
    quantized_experts.BY_WEIGHTS: partial(workloads.group_expert_workloads, batch_invariant=False),
    w8a8_experts.TILES: workloads.channel_expert_workloads,
}
NAME_TO_TUNABLE: dict[str, Tunable[Any]] = {tunable.name: tunable for tunable in _TUNABLE_TO_WORKLOADS}
"""All kernels with a choice."""

_BFLOAT16, _INT8, _FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn

# (out_features, in_features) of one layer's products: query, key and value; attention's output; gate and up; down
_LLAMA_8B = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
_QWEN3_06B = (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)
_LM_HEADS = (128256, 4096), (151936, 1024)
_MIXTRAL = 8, 4096, 14336  # num_experts, hidden_size, intermediate_size
_FEW_ROWS, _PROMPT, _OTHERS = (16, 64), (4096,), (32, 128, 512)
assert {*_FEW_ROWS, *_PROMPT, *_OTHERS} == {*ROW_BUCKETS}
_WEIGHTS = (4, True), (8, False)
"""Bits, and whether there are minimums, as the loader quantizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One choice to make: a kernel at a key."""

    tunable: Tunable[Any]
    key: tuple[KeyValue, ...]
    build: Callable[[torch.device], list[Workload]]
    """Allocates the operands; on the meta device for those who only compile."""

    @property
    def title(self) -> str:
        values = (f"{name}={str(value).removeprefix('torch.')}" for name, value in self.named_key.items())
        return f"{self.tunable.name}({', '.join(values)})"

    @property
    def named_key(self) -> dict[str, KeyValue]:
        return dict(zip(self.tunable.key, self.key, strict=True))

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The default first."""
        return self.tunable.candidates(*self.key)


def create_case(name: str, key: tuple[KeyValue, ...]) -> Case:
    """Return the choice of this kernel at this key."""
    tunable = NAME_TO_TUNABLE[name]
    build = _TUNABLE_TO_WORKLOADS[tunable]
    return Case(tunable, key, lambda device: build(*key, device=device))


def all_cases(compute_capability: tuple[int, int]) -> Iterator[Case]:
    """Yield the choices of a device of this capability, most valuable first."""
    elements = (_FLOAT8, _INT8) if compute_capability >= (8, 9) else (_INT8,)
    single, *several = few_rows.FEW_ROWS
    yield from _few_rows_cases(single)
    for head_dim, kv_dtype in ((128, _BFLOAT16), (64, _BFLOAT16), *((128, element) for element in elements)):
        yield create_case("paged_attention_decode", (head_dim, kv_dtype, 16))
        yield create_case("paged_attention_prefill", (head_dim, kv_dtype))
    for shapes, buckets in product((_LLAMA_8B, _QWEN3_06B), (_FEW_ROWS, _PROMPT)):
        yield from _linear_cases(buckets, shapes, elements)
    yield from _expert_cases((*_FEW_ROWS, *_PROMPT), elements)
    for rows in several:
        yield from _few_rows_cases(rows)
    yield from _linear_cases(_OTHERS, (*_LLAMA_8B, *_QWEN3_06B), elements)
    yield from _expert_cases(_OTHERS, elements)


def _few_rows_cases(rows: int) -> Iterator[Case]:
    for (attention_in, attention_out, gate_up, down), head in zip(
        (_LLAMA_8B, _QWEN3_06B), _LM_HEADS, strict=True
    ):
        yield create_case("gated_linear_few_rows", (*gate_up, _BFLOAT16, rows))
        for shape in (down, attention_in, attention_out, head):
            yield create_case("linear_few_rows", (*shape, _BFLOAT16, rows))


def _linear_cases(
    buckets: tuple[int, ...], shapes: tuple[tuple[int, int], ...], elements: tuple[torch.dtype, ...]
) -> Iterator[Case]:
    for rows, shape in product(buckets, shapes):
        yield from _quantized_cases("linear", shape, rows, elements)


def _expert_cases(buckets: tuple[int, ...], elements: tuple[torch.dtype, ...]) -> Iterator[Case]:
    num_experts, hidden_size, inner = _MIXTRAL
    for rows in buckets:
        yield create_case("fused_moe_gate_up", (*_MIXTRAL, rows))
        yield create_case("fused_moe_down", (*_MIXTRAL, rows))
        for shape in ((2 * inner, hidden_size, True), (hidden_size, inner, False)):
            yield from _quantized_cases("experts", (num_experts, *shape), rows, elements)


def _quantized_cases(
    kind: str, shape: tuple[int, ...], rows: int, elements: tuple[torch.dtype, ...]
) -> Iterator[Case]:
    for bits, is_affine in _WEIGHTS:
        yield create_case(f"quantized_{kind}", (*shape, bits, is_affine, rows))
        if rows >= quantized_linear.WIDE_ROWS:
            yield create_case(f"quantized_{kind}_by_weights", (*shape, bits, is_affine, rows))
    for element in elements:
        yield create_case(f"w8a8_{kind}", (*shape, element, rows))
