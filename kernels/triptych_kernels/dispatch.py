"""Which implementation of an op runs: decided by the tensors' device, in one table, with no fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

DEVICE_TO_IMPL = {
    "cpu": "torch",
    "cuda": "torch",
}
"""Plain torch serves both devices; an implementation made for one of them takes over its line here."""

IMPLS = ("torch", "reference")
"""Packages beside this module, each with one file per op; `reference` is for tests alone."""


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
        impl = DEVICE_TO_IMPL.get(device_type)
        if impl is None:
            raise ValueError(
                f"{op}: no implementation for device {device_type!r}; there are "
                f"{', '.join(sorted(DEVICE_TO_IMPL))}"
            )
    return _load(op, impl)


@cache
def _load(op: str, impl: str) -> Callable[..., Any]:
    if impl not in IMPLS:
        raise ValueError(f"{op}: no implementation {impl!r}; there are {', '.join(IMPLS)}")
    function: Callable[..., Any] = getattr(import_module(f"triptych_kernels.{impl}.{op}"), op)
    return function
