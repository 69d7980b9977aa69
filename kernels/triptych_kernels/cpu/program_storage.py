"""Turns a recorded program into a `StoredProgram`: addresses become regions and offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.cpu.call_list import PackedCall
from triptych_kernels.cpu.launch import find_kernel
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program
from triptych_kernels.cpu.stored_program import (
    Region,
    StoredCall,
    StoredOutput,
    StoredProgram,
    StoredStruct,
)

BUFFERS, CONSTANTS = "buffers", "constants"
_ALIGNMENT = 64
_ADDRESS_KINDS = "PQ"  # of fields, see kernel.h


class NotStorable(Exception):
    """A program reads memory without a name; says which kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class Extracted:
    """A stored program, and what its region of constants holds."""

    program: StoredProgram
    constants: tuple[tuple[int, Tensor], ...]
    """Offset of each in the region, and its bytes, [n] uint8."""
    constant_bytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Memory that is known."""

    start: int
    num_bytes: int
    region: str
    offset: int
    """Place of the memory's start in the region."""


def extract(program: Program, named: Mapping[str, Tensor]) -> Extracted:
    """Return a program without its addresses.

    Args:
        named: Memory that the reader will have at hand, such as inputs and caches. Anything else that the calls read is
            a constant.
    Raises:
        NotStorable: A call holds an address that lies in none of them.
    """
    memory = _Memory(program, named)
    outputs = [
        StoredOutput(
            *memory.place(output.data_ptr(), "an output"),
            tuple(output.shape),
            str(output.dtype).removeprefix("torch."),
        )
        for output in program.outputs
    ]
    calls = [memory.store_call(call) for call in program.calls]
    return Extracted(
        StoredProgram(memory.regions, calls, outputs), tuple(memory.constants), memory.constant_bytes
    )


class _Memory:
    """All memory that a program uses, by region."""

    def __init__(self, program: Program, named: Mapping[str, Tensor]) -> None:
        """
        Args:
            named: As of `extract`.
        """
        spans = [
            _Span(program.memory.data_ptr(), program.memory.nbytes, BUFFERS, 0),
            *(_Span(tensor.data_ptr(), tensor.nbytes, name, 0) for name, tensor in named.items()),
        ]
        self._known = {span.start: span for span in spans}
        self.constants: list[tuple[int, Tensor]] = []
        self.constant_bytes = 0
        for operand in program.operands:
            if operand.device.type == "cpu":  # else it is a stand-in for a buffer or an input
                self._add_constant(operand)
        sizes = {
            BUFFERS: program.memory.nbytes,
            CONSTANTS: self.constant_bytes,
            **{name: tensor.nbytes for name, tensor in named.items()},
        }
        self.regions = [Region(name, size) for name, size in sizes.items()]
        self._numbers = {name: number for number, name in enumerate(sizes)}

    def _add_constant(self, operand: Tensor) -> None:
        storage = operand.untyped_storage()
        if not storage.nbytes() or _find(self._known, storage.data_ptr()) is not None:
            return
        start, end = storage.data_ptr(), self.constant_bytes
        self._known[start] = _Span(start, storage.nbytes(), CONSTANTS, end)
        self.constants.append((end, _as_bytes(operand)))
        self.constant_bytes = -(-(end + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT

    def place(self, address: int, what: str) -> tuple[int, int]:
        """Return the number of the region that an address lies in, and its offset there."""
        span = _find(self._known, address)
        if span is None:
            raise NotStorable(f"{what} reads memory that is neither input, cache, weight nor buffer")
        return self._numbers[span.region], span.offset + address - span.start

    def store_call(self, call: PackedCall) -> StoredCall:
        """Return a call without its addresses."""
        ahead: tuple[int, ...] = ()
        if call.ahead is not None:
            where = self.place(call.ahead.address, f"the weight after {call.kernel}")
            ahead = (*where, call.ahead.num_panels, call.ahead.panel_bytes)
        return StoredCall(
            self._store_struct(call.kernel, call.struct),
            call.count,
            [self._store_struct(stage.kernel, stage.struct) for stage in call.stages],
            call.stages[0].count if call.stages else "",
            call.stages_place,
            ahead,
        )

    def _store_struct(self, name: str, content: bytes) -> StoredStruct:
        layout = find_kernel(isa(), name).layout
        struct, addresses = bytearray(content), []
        values = layout.unpack(content)
        width = layout.size // len(values)
        for number, (kind, value) in enumerate(zip(layout.format, values, strict=True)):
            if kind in _ADDRESS_KINDS and value:
                addresses.append((number * width, *self.place(value, name)))
                struct[number * width : (number + 1) * width] = bytes(width)
        return StoredStruct(name, struct.hex(), addresses)


def _find(known: Mapping[int, _Span], address: int) -> _Span | None:
    """Return the memory that an address lies in."""
    starts = sorted(known)
    found = bisect_right(starts, address) - 1
    if found < 0:
        return None
    span = known[starts[found]]
    return span if address < span.start + span.num_bytes else None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
