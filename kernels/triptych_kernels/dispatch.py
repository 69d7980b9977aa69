"""Which implementation of an op runs: decided by device, dtype and what was built, in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from triptych_kernels.cpu.library import DTYPES, isa
from triptych_kernels.cpu.packed_weight import PackedWeight

DEVICE_TO_IMPL = {
    "cpu": "torch",
    "cuda": "torch",
    "meta": "torch",
}
"""Plain torch serves all devices; an implementation made for one of them takes over its line here. Tensors on the
meta device are those of a recording, see `cpu.program`."""

NATIVE_OPS = frozenset(
    {
        "embedding",
        "gather_rows",
        "paged_attention",
        "process_logits",
        "rms_norm",
        "rotary_embedding",
        "sample",
        "token_logprobs",
        "write_kv",
    }
)
"""Those that `cpu` takes over where its library was built and understands the tensor's dtype."""

PACKED_OPS = frozenset({"embedding", "gated_linear", "linear"})
"""Those that `cpu` has for packed weights."""

IMPLS = ("cpu", "torch", "reference")
"""Packages beside this module; all but `cpu` have one file per op, and `reference` is for tests alone."""


def find_impl(op: str, operand: Tensor | PackedWeight, impl: str | None = None) -> Callable[..., Any]:
    """The function that computes `op` with such an operand.

    Args:
        op: name of the op: of its module in each implementation, and of the function therein.
        operand: of the op: a tensor, whose device and dtype decide, or a packed weight.
        impl: one of `IMPLS`, for tests and benchmarks; None: the device's own.
    Raises:
        ValueError: no implementation is meant for this device, or none has the asked name.
    """
    if impl is None:
        impl = "cpu" if _is_native(op, operand) else DEVICE_TO_IMPL.get(operand.device.type)
        if impl is None:
            raise ValueError(
                f"{op}: no implementation for device {operand.device.type!r}; there are "
                f"{', '.join(sorted(DEVICE_TO_IMPL))}"
            )
    return _load(op, impl)


def _is_native(op: str, operand: Tensor | PackedWeight) -> bool:
    if isinstance(operand, PackedWeight):
        return op in PACKED_OPS
    on_cpu = operand.device.type in ("cpu", "meta")
    return op in NATIVE_OPS and on_cpu and operand.dtype in DTYPES and bool(isa())


@cache
def _load(op: str, impl: str) -> Callable[..., Any]:
    known = [name for name in IMPLS if name != "cpu" or op in NATIVE_OPS | PACKED_OPS]
    if impl not in known:
        raise ValueError(f"{op}: no implementation {impl!r}; there are {', '.join(known)}")
    function: Callable[..., Any] = getattr(import_module(f"triptych_kernels.{impl}.{op}"), op)
    return function
