"""The ops, one row for each, and the choice of an implementation by device, dtype and what was built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.base import LinearWeight

IMPLS = ("cpu", "triton", "torch", "reference")
"""Packages that hold implementations. `torch` and `reference` have every op; `reference` is only for tests."""

DEVICE_TO_IMPL = {"cpu": "cpu", "cuda": "triton", "meta": "cpu"}
"""Type of a device -> the package with kernels of its own for it; `torch` computes the ops that this package lacks.
Tensors on the meta device belong to a recording, see `cpu.program`."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op, and which packages compute it.

    Its contract is the function of its name in `ops.<family>`, its tests are in `tests/kernels/ops/test_<name>.py`. An
    implementation is the function of its name in `<impl>.<family>`, or in `triton.<family>.<name>`.
    """

    name: str
    family: str
    native_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of plain tensors that the C++ kernels of `cpu` compute; empty if they compute none."""
    linear_weights: bool = False
    """Whether the op takes each `LinearWeight`, which names the package that computes with it."""
    has_triton: bool = True
    """Whether `triton` computes with plain tensors; otherwise `torch` does on CUDA devices."""

    @property
    def impls(self) -> tuple[str, ...]:
        lacking = set()
        if not (self.native_dtypes or self.linear_weights):
            lacking.add("cpu")
        if not (self.has_triton or self.linear_weights):
            lacking.add("triton")
        return tuple(impl for impl in IMPLS if impl not in lacking)


_FLOATS = (torch.float32, torch.bfloat16)

OPS = {
    op.name: op
    for op in (
        Op("paged_attention", "attention", _FLOATS),
        Op("rotary_embedding", "attention", _FLOATS),
        Op("write_kv", "attention", _FLOATS),
        Op("rotary_and_write_kv", "attention", _FLOATS),
        Op("latent_attention", "latent_attention", _FLOATS),
        Op("write_latent", "latent_attention", _FLOATS),
        Op("choose_keys", "latent_attention", _FLOATS, has_triton=False),
        Op("chosen_attention", "latent_attention", _FLOATS, has_triton=False),
        Op("encode_attention", "encode_attention", _FLOATS, has_triton=False),
        Op("linear", "linear", linear_weights=True),
        Op("gated_linear", "linear", linear_weights=True),
        Op("head_linear", "linear", _FLOATS, has_triton=False),
        Op("adapt_embedding", "linear", (torch.float32,)),
        Op("fused_moe", "moe", linear_weights=True),
        Op("causal_conv", "recurrent", _FLOATS),
        Op("gated_delta_scan", "recurrent", _FLOATS),
        Op("state_space_scan", "recurrent", _FLOATS),
        Op("selective_scan", "recurrent", _FLOATS),
        Op("process_logits", "sampling", (torch.float32,)),
        Op("sample", "sampling", (torch.float32,)),
        Op("token_logprobs", "sampling", (torch.float32,)),
        Op("rms_norm", "elementwise", _FLOATS),
        Op("layer_norm", "elementwise", _FLOATS),
        Op("silu_and_mul", "elementwise"),
        Op("embedding", "elementwise", _FLOATS, linear_weights=True),
        Op("gather_rows", "elementwise", _FLOATS, has_triton=False),  # `x[rows]` is one kernel of torch
        Op("local_ids", "elementwise", (torch.int64,), has_triton=False),
        Op("clear_other_rows", "elementwise", _FLOATS, has_triton=False),
    )
}


def find_impl(
    op: str, operand: Tensor | LinearWeight, impl: str | None = None, *, dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    """Return the function that computes `op` with such an operand.

    Args:
        op: One of `OPS`.
        operand: An operand of the op. A tensor's device and dtype decide; a `LinearWeight` names its implementation.
        impl: One of `IMPLS`, for tests and benchmarks; None chooses the device's own.
        dtype: Dtype that decides for operands of several dtypes; None: a tensor's own.
    Raises:
        ValueError: No implementation is meant for this device, or none has the asked name.
    """
    return load_impl(op, impl or _impl_for(OPS[op], operand, dtype))


def _impl_for(op: Op, operand: Tensor | LinearWeight, dtype: torch.dtype | None) -> str:
    if isinstance(operand, LinearWeight):
        return operand.impl
    device = operand.device.type
    impl = DEVICE_TO_IMPL.get(device)
    if impl == "triton":
        return "triton" if op.has_triton else "torch"
    if impl == "cpu":
        return "cpu" if (dtype or operand.dtype) in op.native_dtypes and isa() else "torch"
    raise ValueError(
        f"{op.name}: no implementation for device {device!r}; there are {', '.join(DEVICE_TO_IMPL)}"
    )


@cache
def load_impl(op: str, impl: str) -> Callable[..., Any]:
    """Import the function that `impl` has for `op`.

    Raises:
        ValueError: It has none; the message lists the packages that have one.
    """
    row = OPS[op]
    if impl not in row.impls:
        raise ValueError(f"{op}: no implementation {impl!r}; there are {', '.join(row.impls)}")
    module = f"triptych_kernels.{impl}.{row.family}" + (f".{op}" if impl == "triton" else "")
    function: Callable[..., Any] = getattr(import_module(module), op)
    return function
