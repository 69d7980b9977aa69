"""Turns a recorded program into a `StoredProgram`: addresses become regions and offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
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
    spans = [
        _Span(program.memory.data_ptr(), program.memory.nbytes, BUFFERS, 0),
        *(_Span(tensor.data_ptr(), tensor.nbytes, name, 0) for name, tensor in named.items()),
    ]
    known = {span.start: span for span in spans}
    constants: list[tuple[int, Tensor]] = []
    end = 0
    for operand in program.operands:
        if operand.device.type != "cpu":
            continue  # a stand-in for a buffer or an input
        storage = operand.untyped_storage()
        if not storage.nbytes() or _find(known, storage.data_ptr()) is not None:
            continue
        known[storage.data_ptr()] = _Span(storage.data_ptr(), storage.nbytes(), CONSTANTS, end)
        constants.append((end, _as_bytes(operand)))
        end = -(-(end + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
    sizes = {BUFFERS: program.memory.nbytes, CONSTANTS: end, **{n: t.nbytes for n, t in named.items()}}
    numbers = {name: number for number, name in enumerate(sizes)}

    def place(address: int, what: str) -> tuple[int, int]:
        span = _find(known, address)
        if span is None:
            raise NotStorable(f"{what} reads memory that is neither input, cache, weight nor buffer")
        return numbers[span.region], span.offset + address - span.start

    def store(name: str, content: bytes) -> StoredStruct:
        layout = find_kernel(isa(), name).layout
        struct, addresses = bytearray(content), []
        values = layout.unpack(content)
        width = layout.size // len(values)
        for number, (kind, value) in enumerate(zip(layout.format, values, strict=True)):
            if kind in _ADDRESS_KINDS and value:
                addresses.append((number * width, *place(value, name)))
                struct[number * width : (number + 1) * width] = bytes(width)
        return StoredStruct(name, struct.hex(), addresses)

    calls = [
        StoredCall(
            store(call.kernel, call.struct),
            call.count,
            [store(stage.kernel, stage.struct) for stage in call.stages],
            call.stages[0].count if call.stages else "",
            call.stages_place,
            _store_ahead(call, place),
        )
        for call in program.calls
    ]
    outputs = [
        StoredOutput(
            *place(output.data_ptr(), "an output"),
            tuple(output.shape),
            str(output.dtype).removeprefix("torch."),
        )
        for output in program.outputs
    ]
    regions = [Region(name, size) for name, size in sizes.items()]
    return Extracted(StoredProgram(regions, calls, outputs), tuple(constants), end)


def _store_ahead(call: PackedCall, place: Callable[[int, str], tuple[int, int]]) -> Sequence[int]:
    if call.ahead is None:
        return ()
    where = place(call.ahead.address, "the weight after " + call.kernel)
    return (*where, call.ahead.num_panels, call.ahead.panel_bytes)


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
