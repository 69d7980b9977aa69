"""The calls that `test_compiles` compiles for Hopper: those that each op's test file declares for models."""

from __future__ import annotations

from importlib import import_module

from tests.kernels.operands import ModelCall
from triptych_kernels.registry import OPS

CALLS: dict[str, ModelCall] = {
    f"{op.name}, {name}": call
    for op in OPS.values()
    if "triton" in op.impls
    for name, call in import_module(f"tests.kernels.ops.test_{op.name}").MODEL_CALLS.items()
}
