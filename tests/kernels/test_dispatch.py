"""Dispatch: the device decides, an override is obeyed, and nothing falls back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import triptych_kernels
from triptych_kernels import ops
from triptych_kernels import registry as dispatch
from triptych_kernels.ops import silu_and_mul
from triptych_kernels.reference.silu_and_mul import silu_and_mul as reference_silu_and_mul
from triptych_kernels.torch.silu_and_mul import silu_and_mul as torch_silu_and_mul

PACKAGE = Path(triptych_kernels.__file__).parent
OPS = sorted(path.stem for path in (PACKAGE / "ops").glob("*.py") if path.stem != "__init__")


def test_an_op_without_a_native_implementation_runs_in_plain_torch_on_the_cpu() -> None:
    assert dispatch.find_impl("silu_and_mul", torch.empty(2)) is torch_silu_and_mul


def test_cuda_tensors_go_to_triton_where_it_has_the_op_and_to_torch_elsewhere() -> None:
    operand = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for op in OPS:
        impl = dispatch.find_impl(op, operand).__module__.split(".")[1]
        assert impl == ("triton" if op in dispatch.TRITON_OPS else "torch"), op


def test_an_op_without_a_native_implementation_has_none_to_ask_for() -> None:
    with pytest.raises(ValueError, match="silu_and_mul: no implementation 'cpu'; there are triton, torch, "):
        silu_and_mul(torch.empty(2, 4), impl="cpu")


def test_override_chooses_the_named_implementation() -> None:
    assert dispatch.find_impl("silu_and_mul", torch.empty(2), "reference") is reference_silu_and_mul


def test_unknown_device_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        ValueError, match="silu_and_mul: no implementation for device 'xpu'; there are cpu, cuda, meta"
    ):
        dispatch.find_impl("silu_and_mul", SimpleNamespace(device=torch.device("xpu")))


def test_unknown_implementation_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        ValueError, match="silu_and_mul: no implementation 'tritn'; there are triton, torch, reference"
    ):
        silu_and_mul(torch.empty(2, 4), impl="tritn")


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_every_implementation(op: str) -> None:
    assert op in ops.__all__
    partial = {
        "cpu": dispatch.NATIVE_OPS | dispatch.PACKED_OPS,
        "triton": dispatch.TRITON_OPS | dispatch.QUANTIZED_OPS,
    }
    for impl in dispatch.IMPLS:
        if op not in partial.get(impl, {op}):
            continue
        assert dispatch.find_impl(op, torch.empty(2), impl).__name__ == op
