"""The implementations of an op under test: fixtures made from its row in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device import ON_DEVICE, TRITON_DTYPES
from tests.kernels.operands import keys_as_rows
from tests.kernels.poison import poisoned_allocations
from triptych_kernels.cpu.attention import serves
from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.registry import OPS


@dataclass(frozen=True, slots=True)
class Implementation:
    """An implementation, and the device of its operands. Triton's is interpreted where there is no CUDA device."""

    name: str
    """Its package, or its instruction set if it is native."""
    isa: str
    """Instruction set of the native kernels; empty for the others."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes that it computes with here, float32 first."""

    @property
    def is_triton(self) -> bool:
        return self.name == "triton"

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter computes, which takes seconds for thousands of programs."""
        return self.is_triton and not ON_DEVICE

    @property
    def has_fixed_sums(self) -> bool:
        """Whether a row has the same bits in any batch; torch chooses its sums by the shape."""
        return self.name != "torch"

    def rows_of(self, kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy with keys as rows, of a cache that it writes from keys of this dtype."""
        is_native = self.isa and dtype in (torch.float32, torch.bfloat16) and serves(kv_cache)
        return keys_as_rows(kv_cache) if is_native else kv_cache.clone()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.is_triton and ON_DEVICE else "cpu")

    def __call__(self, op: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute `op` in memory that shows what a kernel forgets to write."""
        with poisoned_allocations():
            return op(*operands, **options, impl="triton" if self.is_triton else None)


def _implementations(op: str) -> Iterator[Implementation]:
    row = OPS[op]
    if "cpu" in row.impls:
        native = row.native_dtypes or (torch.float32, torch.bfloat16)
        yield from (Implementation(isa, isa, native) for isa in usable_isas())
    yield Implementation("torch", "", (torch.float32, torch.bfloat16, torch.float16))
    if row.has_triton:
        yield Implementation("triton", "", TRITON_DTYPES)


def _marks(implementation: Implementation) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if implementation.device.type == "cuda" else []


@dataclass(frozen=True, slots=True)
class Case:
    """An implementation, and a dtype that it computes with."""

    implementation: Implementation
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.implementation.device

    def __call__(self, op: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        return self.implementation(op, *operands, **options)


def implementations_of(op: str, *, interpreted: bool = True) -> Any:
    """Return a fixture with each implementation that the registry has for `op`.

    Args:
        interpreted: Whether Triton's interpreter is one of them where there is no CUDA device.
    """
    params = [
        pytest.param(i, id=i.name, marks=_marks(i))
        for i in _implementations(op)
        if interpreted or not i.is_interpreted
    ]

    @pytest.fixture(params=params)
    def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
        with forced_isa(request.param.isa):
            use_threads(2)
            yield request.param

    return implementation


def cases_of(op: str) -> Any:
    """Return a fixture with each implementation of `op` and each dtype that it computes with."""
    params = [
        pytest.param(Case(i, dtype), id=f"{i.name}-{str(dtype).removeprefix('torch.')}", marks=_marks(i))
        for i in _implementations(op)
        for dtype in i.dtypes
    ]

    @pytest.fixture(params=params)
    def case(request: pytest.FixtureRequest) -> Iterator[Case]:
        with forced_isa(request.param.implementation.isa):
            use_threads(2)
            yield request.param

    return case
