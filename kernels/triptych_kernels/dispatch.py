"""Which implementation of an op runs: decided by device, dtype and what was built, in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from triptych_kernels.cpu.library import DTYPES, isa

DEVICE_TO_IMPL = {
    "cpu": "torch",
    "cuda": "torch",
}
"""Plain torch serves both devices; an implementation made for one of them takes over its line here."""

NATIVE_OPS = frozenset({"paged_attention"})
"""Those that `cpu` has; it takes them over where its library was built and understands the tensor's dtype."""

IMPLS = ("cpu", "torch", "reference")
"""Packages beside this module; all but `cpu` have one file per op, and `reference` is for tests alone."""


def find_impl(op: str, tensor: Tensor, impl: str | None = None) -> Callable[..., Any]:
    """The function that computes `op` where `tensor` stands.

    Args:
        op: name of the op: of its module in each implementation, and of the function therein.
        tensor: an input of the op; its device decides.
        impl: one of `IMPLS`, for tests and benchmarks; None: the device's own.
    Raises:
        ValueError: no implementation is meant for this device, or none has the asked name.
    """
    if impl is None:
        device_type = tensor.device.type
        impl = "cpu" if _is_native(op, tensor) else DEVICE_TO_IMPL.get(device_type)
        if impl is None:
            raise ValueError(
                f"{op}: no implementation for device {device_type!r}; there are "
                f"{', '.join(sorted(DEVICE_TO_IMPL))}"
            )
    return _load(op, impl)


def _is_native(op: str, tensor: Tensor) -> bool:
    return op in NATIVE_OPS and tensor.device.type == "cpu" and tensor.dtype in DTYPES and bool(isa())


@cache
def _load(op: str, impl: str) -> Callable[..., Any]:
    known = [name for name in IMPLS if name != "cpu" or op in NATIVE_OPS]
    if impl not in known:
        raise ValueError(f"{op}: no implementation {impl!r}; there are {', '.join(known)}")
    function: Callable[..., Any] = getattr(import_module(f"triptych_kernels.{impl}.{op}"), op)
    return function
