"""Calls native kernels: at once, or into a recording where the tensors are on the meta device."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from operator import itemgetter
from typing import Any, Protocol

from torch import Tensor

from triptych_kernels.cpu.library import isa, load, raise_failure

Operand = Tensor | int | float | None
"""A field of a kernel's struct, 8 bytes: an address, an int64_t or a double. None is the null address."""


class _Field(ctypes.Structure):
    """`Field` in kernel.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("kind", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the native library, and the fields of the struct that it reads, as the library names them."""

    name: str
    function: Any
    """Takes the address of the struct and the number of rows; its result is for `raise_failure`."""
    fields: tuple[str, ...]
    """In their order in the struct. The field of a struct inside is `inner_field`."""
    layout: struct.Struct
    writable: frozenset[str]
    """The fields with addresses of what the function may write. It only reads what is at the others."""
    rows_function: Any
    """Takes the address of the struct, the first of some rows and the end of them, as a `Stage` in stages.h; None if a
    row may depend on others."""

    def pack(
        self, operands: Mapping[str, Operand], address_of: Callable[[Tensor], int] = Tensor.data_ptr
    ) -> bytes:
        """Return the struct that the kernel reads.

        Args:
            operands: A value for each field.
            address_of: Gives the address for a tensor.
        Raises:
            TypeError: A field has no operand, or an operand no field; names both.
            struct.error: An operand is not of its field's kind.
        """
        try:
            values = itemgetter(*self.fields)(operands)
        except KeyError:
            values = ()
        if len(values) != len(operands):
            raise TypeError(
                f"{self.name}: the operands {', '.join(operands)} are not the fields {', '.join(self.fields)}"
            )
        return self.layout.pack(
            *[address_of(v) if isinstance(v, Tensor) else 0 if v is None else v for v in values]
        )


class Recorder(Protocol):
    """Takes calls instead of carrying them out; see `program`."""

    def append(
        self, kernel: str, rows: Tensor, operands: Mapping[str, Operand], filled_like: Tensor
    ) -> None: ...


recorders: list[Recorder] = []
"""Recordings in progress, the innermost last. A recording is made on one thread, before steps are computed."""


def launch(kernel: str, rows: Tensor, filled_like: Tensor | None = None, /, **operands: Operand) -> None:
    """Run `triptych_<kernel>` of the native library, or record the call.

    Args:
        rows: Any tensor with what the kernel calls rows as its first axis.
        filled_like: A tensor with as many rows as what the kernel fills; None means `rows`.
        operands: The fields of the kernel's struct, by name. Tensors must be as the struct describes them, which is
            not checked.
    Raises:
        MemoryError: The system has no memory for what the kernel needs while it runs.
        RuntimeError: The tensors have no memory and no recording is in progress; or the system does not start the
            threads.
        TypeError: The operands are not the fields of the kernel's struct.
    """
    if rows.device.type == "meta":
        if not recorders:
            raise RuntimeError(f"{kernel}: tensors on the meta device hold nothing to compute with")
        recorders[-1].append(kernel, rows, operands, rows if filled_like is None else filled_like)
        return
    found = find_kernel(isa(), kernel)
    raise_failure(found.function(found.pack(operands), rows.shape[0]), kernel)


@cache
def find_kernel(isa: str, name: str) -> Kernel:
    """Look up a kernel in the library for one instruction set.

    Raises:
        RuntimeError: The library has no such kernel, since it is older than this file.
    """
    library = load(isa)
    try:
        function = getattr(library, f"triptych_{name}")
        list_fields = getattr(library, f"triptych_{name}_fields")
    except AttributeError as error:
        raise RuntimeError(
            f"the native library for {isa} has no kernel {name!r} or is out of date; "
            "`python -m triptych_kernels.cpu.build` builds it anew"
        ) from error
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    list_fields.argtypes, list_fields.restype = [], ctypes.POINTER(_Field)
    fields: list[str] = []
    kinds, writable = "", set[str]()
    for field in takewhile(lambda field: field.name, list_fields()):
        fields.append(field.name.decode().replace(".", "_"))
        kinds += chr(field.kind)
        if chr(field.kind) == "P":
            writable.add(fields[-1])
    rows_function = getattr(library, f"triptych_{name}_rows", None)
    return Kernel(name, function, tuple(fields), struct.Struct(kinds), frozenset(writable), rows_function)
