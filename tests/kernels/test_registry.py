"""The registry: every op has what its row says, the device decides, an override is obeyed, and nothing falls back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triptych_kernels import ops
from triptych_kernels.ops import silu_and_mul
from triptych_kernels.reference.elementwise import silu_and_mul as reference_silu_and_mul
from triptych_kernels.registry import IMPLS, OPS, find_impl
from triptych_kernels.torch.elementwise import silu_and_mul as torch_silu_and_mul


def test_an_op_without_a_native_kernel_runs_in_torch_on_cpu() -> None:
    assert find_impl("silu_and_mul", torch.empty(2)) is torch_silu_and_mul


def test_cuda_tensors_go_to_triton_where_it_has_the_op() -> None:
    operand = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for op in OPS.values():
        impl = find_impl(op.name, operand).__module__.split(".")[1]
        assert impl == ("triton" if op.has_triton else "torch"), op


def test_a_missing_implementation_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="silu_and_mul: no implementation 'cpu'; there are triton, torch, "):
        silu_and_mul(torch.empty(2, 4), impl="cpu")


def test_override_chooses_the_named_implementation() -> None:
    assert find_impl("silu_and_mul", torch.empty(2), "reference") is reference_silu_and_mul


def test_unknown_device_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(
        ValueError, match="silu_and_mul: no implementation for device 'xpu'; there are cpu, cuda, meta"
    ):
        find_impl("silu_and_mul", SimpleNamespace(device=torch.device("xpu")))


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(
        ValueError, match="silu_and_mul: no implementation 'tritn'; there are triton, torch, reference"
    ):
        silu_and_mul(torch.empty(2, 4), impl="tritn")


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_contract_and_implementations(op: str) -> None:
    contract = getattr(ops, op)
    assert contract.__module__ == f"triptych_kernels.ops.{OPS[op].family}"
    for impl in OPS[op].impls:
        assert callable(find_impl(op, torch.empty(2), impl))
    assert {"torch", "reference"} <= set(OPS[op].impls) <= set(IMPLS)


def test_every_contract_has_a_row() -> None:
    contracts = {name for name, value in vars(ops).items() if callable(value)}
    assert contracts == set(OPS)
