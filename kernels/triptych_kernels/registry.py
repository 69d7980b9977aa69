"""Which implementation of an op runs: decided by device, dtype and what was built, in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from triptych_kernels.cpu.library import DTYPES, isa
from triptych_kernels.weights.base import HeldWeight

DEVICES = ("cpu", "cuda", "meta")
"""Plain torch serves all of them; `cpu` and `triton` take over the ops named below. Tensors on the meta device are
those of a recording, see `cpu.program`."""

NATIVE_OPS = frozenset(
    {
        "embedding",
        "gather_rows",
        "paged_attention",
        "process_logits",
        "rms_norm",
        "rotary_and_write_kv",
        "rotary_embedding",
        "sample",
        "token_logprobs",
        "write_kv",
    }
)
"""Those that `cpu` takes over where its library was built and understands the tensor's dtype."""

PACKED_OPS = frozenset({"embedding", "fused_moe", "gated_linear", "linear"})
"""Those that `cpu` has for packed weights."""

QUANTIZED_OPS = frozenset({"embedding", "fused_moe", "gated_linear", "linear"})
"""Those that `triton` has for quantized weights."""

TRITON_OPS = frozenset(
    {
        "embedding",
        "fused_moe",
        "gated_linear",
        "linear",
        "paged_attention",
        "process_logits",
        "rms_norm",
        "rotary_and_write_kv",
        "rotary_embedding",
        "sample",
        "silu_and_mul",
        "token_logprobs",
        "write_kv",
    }
)
"""Those that `triton` takes over on CUDA devices."""

IMPLS = ("cpu", "triton", "torch", "reference")
"""Packages beside this module, one file per op in each; `torch` and `reference` have every op, and `reference` is for
tests alone."""


_TRITON_FAMILIES = {
    "attention": {"paged_attention", "rotary_and_write_kv", "rotary_embedding", "write_kv"},
    "elementwise": {"embedding", "rms_norm", "silu_and_mul"},
    "linear": {"gated_linear", "linear"},
    "moe": {"fused_moe"},
    "sampling": {"process_logits", "sample", "token_logprobs"},
}
"""Folder under `triton` -> its ops; the others are modules of `triton` itself."""

_HELD_WEIGHT_OPS = {"cpu": PACKED_OPS, "triton": QUANTIZED_OPS}


def find_impl(op: str, operand: Tensor | HeldWeight, impl: str | None = None) -> Callable[..., Any]:
    """The function that computes `op` with such an operand.

    Args:
        op: name of the op: of its module in each implementation, and of the function therein.
        operand: of the op: a tensor, whose device and dtype decide, or a held weight, which names
            its implementation.
        impl: one of `IMPLS`, for tests and benchmarks; None: the device's own.
    Raises:
        ValueError: no implementation is meant for this device, or none has the asked name.
    """
    return _load(op, impl or _impl_for(op, operand))


def _impl_for(op: str, operand: Tensor | HeldWeight) -> str:
    if isinstance(operand, HeldWeight):
        return operand.impl if op in _HELD_WEIGHT_OPS[operand.impl] else "torch"
    device = operand.device.type
    if device not in DEVICES:
        raise ValueError(f"{op}: no implementation for device {device!r}; there are {', '.join(DEVICES)}")
    if device == "cuda":
        return "triton" if op in TRITON_OPS else "torch"
    return "cpu" if op in NATIVE_OPS and operand.dtype in DTYPES and isa() else "torch"


@cache
def _load(op: str, impl: str) -> Callable[..., Any]:
    owned = {"cpu": NATIVE_OPS | PACKED_OPS, "triton": TRITON_OPS | QUANTIZED_OPS}
    known = [name for name in IMPLS if op in owned.get(name, {op})]
    if impl not in known:
        raise ValueError(f"{op}: no implementation {impl!r}; there are {', '.join(known)}")
    families = [family for family, ops in _TRITON_FAMILIES.items() if impl == "triton" and op in ops]
    function: Callable[..., Any] = getattr(
        import_module(".".join(["triptych_kernels", impl, *families, op])), op
    )
    return function
