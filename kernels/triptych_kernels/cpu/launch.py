"""Calling native kernels: at once, or into a recording where the tensors are on the meta device."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from triptych_kernels.cpu.library import isa, load, raise_failure

Argument = Tensor | int | float | None
"""A field of a kernel's struct, 8 bytes: an address, an int64_t or a double; None is the null address."""


class Recorder(Protocol):
    """What takes calls instead of carrying them out; see `program`."""

    def append(
        self, kernel: str, rows: Tensor, arguments: Sequence[Argument], filled_like: Tensor
    ) -> None: ...


_recorders: list[Recorder] = []
"""The innermost is the last; a recording is made on one thread, before steps are computed."""


def launch(kernel: str, rows: Tensor, *arguments: Argument, filled_like: Tensor | None = None) -> None:
    """Run `triptych_<kernel>` of the native library, or record the call.

    Args:
        rows: any tensor whose first axis is what the kernel calls rows.
        arguments: the fields of the kernel's struct, in order; tensors as it describes them, not checked.
        filled_like: what the kernel fills has as many rows as this tensor; None: as `rows`.
    Raises:
        MemoryError: the system has no memory for what the kernel needs while it runs.
        RuntimeError: tensors without memory, and no recording under way; or the system does not start the threads.
    """
    if rows.device.type == "meta":
        if not _recorders:
            raise RuntimeError(f"{kernel}: tensors on the meta device hold nothing to compute with")
        _recorders[-1].append(kernel, rows, arguments, rows if filled_like is None else filled_like)
        return
    words = to_words([a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
    raise_failure(find_kernel(isa(), kernel)(words, rows.shape[0]), kernel)


def to_words(values: Sequence[int | float | None]) -> ctypes.Array[ctypes.c_int64]:
    """The struct that a kernel reads."""
    words = (ctypes.c_int64 * len(values))()
    for i, value in enumerate(values):
        if isinstance(value, float):
            (words[i],) = struct.unpack("q", struct.pack("d", value))
        else:
            words[i] = value or 0
    return words


@cache
def find_kernel(isa: str, name: str) -> Callable[..., int]:
    """Return `triptych_<name>(arguments, rows)`, whose result is for `raise_failure`.

    Raises:
        AttributeError: the library has no such kernel.
    """
    function = getattr(load(isa), f"triptych_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    kernel: Callable[..., int] = function
    return kernel
