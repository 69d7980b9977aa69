"""The calls of a forward pass in progress, and the rows of the tensors between them.

A buffer has one row for each token, or whatever it counts, one after the other. A view of it is computed with only if
its elements are those of the same row, so that no row of a program depends on another one:

    buffer      | row 0: r elements | row 1 | row 2 | …
    stride r    the axis of rows, at any place among the axes of a view
    others      reach from the view's offset to less than r
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import Operand, find_kernel
from triptych_kernels.cpu.library import isa

_BUFFER_BITS = 40


class NotRecordable(Exception):
    """A model computes something that no native kernel does, which the message names."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A storage on the meta device."""

    keep: torch.UntypedStorage
    """The storage itself, kept so that no other one gets its identity."""
    count: str
    """Name of the step's number that counts its rows."""
    num_rows: int
    """Rows it has room for."""
    memory: Tensor | None = None
    """Memory of an input; None for buffers of the program."""

    @property
    def num_bytes(self) -> int:
        return self.keep.nbytes()

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.num_rows


@dataclass(frozen=True, slots=True)
class Place:
    """The rows of a view."""

    count: str
    num_rows: int
    axis: int
    """Axis of the view that counts rows."""
    group: int
    """Elements of a row along that axis; 1 unless rows were merged with their first axis by `view`."""
    row: int
    """Elements of the view's dtype in a row of its buffer."""


class Call(Protocol):
    """One call of a kernel."""

    @property
    def name(self) -> str:
        """Name of the operation that the model called."""
        ...

    @property
    def kernel(self) -> str: ...

    @property
    def count(self) -> str:
        """Name of its number of rows."""
        ...

    def operands(self) -> Mapping[str, Operand]:
        """Return the fields of the kernel's struct."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """A call with its operands as they were given."""

    name: str
    kernel: str
    count: str
    fields: Mapping[str, Operand]

    def operands(self) -> Mapping[str, Operand]:
        return self.fields


@dataclass(slots=True, eq=False)
class Recording:
    """The calls of one forward pass so far; see `program.record`."""

    more_rows: Callable[[str], int] | None = None
    """Gives for the name of a count the rows of its stand-ins beyond those of the inputs. None means none, and that
    torch computes nothing, so that ops are trusted to keep to their rows."""
    calls: list[Call] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    """Identity of a storage -> its buffer."""

    def input(self, memory: Tensor, *, count: str) -> Tensor:
        """Return a stand-in on the meta device for `memory`, which the program reads when it runs.

        Args:
            memory: [most rows, …], filled by the caller before each run.
            count: Name of the number of its rows.
        """
        num_rows = memory.shape[0] + (0 if self.more_rows is None else self.more_rows(count))
        stand_in = torch.empty((num_rows, *memory.shape[1:]), dtype=memory.dtype, device="meta")
        storage = stand_in.untyped_storage()
        self.buffers[storage._cdata] = Buffer(storage, count, num_rows, memory)
        return stand_in

    def append(self, kernel: str, rows: Tensor, operands: Mapping[str, Operand], filled_like: Tensor) -> None:
        """Record one call. Storages not seen before are its results, with as many rows as `filled_like`.

        Raises:
            NotRecordable: It reads a tensor, or takes a number of rows from one, that no recorded call has filled; or
                an operand does not have its rows along its first axis.
        """
        counted, filled = self._counted(kernel, rows), self._counted(kernel, filled_like)
        writable = find_kernel(isa(), kernel).writable
        for name, operand in operands.items():
            if not isinstance(operand, Tensor) or operand.device.type != "meta":
                continue
            storage = operand.untyped_storage()
            if storage._cdata not in self.buffers:
                if name not in writable:
                    raise NotRecordable(f"{kernel}: no recorded call has filled its operand {name}")
                self.buffers[storage._cdata] = Buffer(storage, filled.count, filled.num_rows)
            if self.more_rows is not None:
                self._check_first_axis(f"{kernel}: {name}", operand)
        if self.more_rows is not None:
            self._check_first_axis(kernel, rows)
        self.calls.append(KernelCall(kernel, kernel, counted.count, operands))

    def _counted(self, kernel: str, tensor: Tensor) -> Buffer:
        buffer = self.buffers.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            raise NotRecordable(f"{kernel}: its rows come from outside of the recording")
        return buffer

    def _check_first_axis(self, name: str, tensor: Tensor) -> None:
        place = self.locate(name, tensor)
        if place.axis != 0 or place.group != 1:
            raise NotRecordable(f"{name} has its {place.count} along axis {place.axis}, not 0")

    def locate(self, name: str, tensor: Tensor) -> Place:
        """Find the rows of a view.

        Args:
            name: What is called with the view, for the message.
        Raises:
            NotRecordable: Nothing has filled it, or it is not made row by row.
        """
        buffer = self.buffers.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            raise NotRecordable(f"{name}: no recorded call has filled its operand of {tuple(tensor.shape)}")
        row, rest = divmod(buffer.row_bytes, tensor.itemsize)
        reach = [
            max(size - 1, 0) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        axes = [axis for axis, elements in enumerate(reach) if elements >= row]
        if not rest and len(axes) == 1:
            (axis,) = axes
            stride = tensor.stride(axis)
            group, rest = divmod(row, stride)
            inside = tensor.storage_offset() + sum(reach) - reach[axis]
            if not rest and tensor.shape[axis] == buffer.num_rows * group and inside < stride:
                return Place(buffer.count, buffer.num_rows, axis, group, row)
        raise NotRecordable(
            f"{name} mixes {buffer.count}: its operand of {tuple(tensor.shape)} is not row by row"
        )

    def new(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> Tensor:
        """Return a tensor for a result, with rows as they are in `place` and the other axes in their order."""
        strides, size = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            if axis != place.axis:
                strides[axis] = size
                size *= shape[axis]
        strides[place.axis] = size
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        storage = tensor.untyped_storage()
        self.buffers[storage._cdata] = Buffer(storage, place.count, place.num_rows)
        return tensor

    def adopt(self, name: str, tensor: Tensor, place: Place) -> None:
        """Take an empty tensor of the model for a result, with rows as they are in `place`.

        Raises:
            NotRecordable: Its rows do not lie one after the other.
        """
        storage = tensor.untyped_storage()
        buffer = Buffer(storage, place.count, place.num_rows)
        self.buffers[storage._cdata] = buffer
        found = self.locate(name, tensor)
        if (found.axis, found.group) != (place.axis, place.group) or buffer.num_bytes % place.num_rows:
            raise NotRecordable(f"{name} mixes {place.count}: its result is not row by row")

    def fewest_rows(self) -> dict[str, int]:
        """Return for each count the smallest number of rows that an input has room for."""
        fewest: dict[str, int] = {}
        for buffer in self.buffers.values():
            if buffer.memory is not None:
                fewest[buffer.count] = min(buffer.num_rows, fewest.get(buffer.count, buffer.num_rows))
        return fewest


def check_same(one: Recording, other: Recording) -> None:
    """Compare two recordings with different numbers of rows, which appear in nothing but the sizes of buffers.

    Raises:
        NotRecordable: Names the first call that differs.
    """
    for a, b in zip(one.calls, other.calls, strict=False):
        if not _is_same(one, a, other, b):
            raise NotRecordable(f"{a.name} depends on the number of {a.count}")
    if len(one.calls) != len(other.calls):
        longer = max(one.calls, other.calls, key=len)
        first = longer[min(len(one.calls), len(other.calls))]
        raise NotRecordable(f"whether {first.name} is called depends on the number of {first.count}")
    if [(b.count, b.row_bytes) for b in one.buffers.values()] != [
        (b.count, b.row_bytes) for b in other.buffers.values()
    ]:
        raise NotRecordable("the size of a result depends on more than one number of rows")


def check_same_outputs(
    one: Recording, outputs: Sequence[Tensor], other: Recording, other_outputs: Sequence[Tensor]
) -> None:
    """Compare the outputs of two recordings as `check_same` compares their calls.

    Raises:
        NotRecordable: They lie elsewhere, or have other shapes.
    """

    def describe(recording: Recording, output: Tensor) -> tuple[object, ...]:
        place = recording.locate("an output", output)
        shape = list(output.shape)
        shape[place.axis] = place.group
        number = list(recording.buffers).index(output.untyped_storage()._cdata)
        strides = [
            stride if size > 1 else 0 for size, stride in zip(output.shape, output.stride(), strict=True)
        ]
        return (number, output.storage_offset(), shape, strides, output.dtype, place.axis)

    if [describe(one, x) for x in outputs] != [describe(other, x) for x in other_outputs]:
        raise NotRecordable("where an output lies depends on its number of rows")


def _is_same(one: Recording, a: Call, other: Recording, b: Call) -> bool:
    if (a.kernel, a.count) != (b.kernel, b.count):
        return False
    (packed, constants), (other_packed, other_constants) = _structure(one, a), _structure(other, b)
    return packed == other_packed and all(map(_is_equal, constants, other_constants))


def _structure(recording: Recording, call: Call) -> tuple[bytes, list[Tensor]]:
    """Return the struct with numbers of buffers for addresses, and the constants among the operands."""
    numbers = {identity: number for number, identity in enumerate(recording.buffers)}
    constants: list[Tensor] = []

    def address(tensor: Tensor) -> int:
        if tensor.device.type != "meta":
            constants.append(tensor)
            return 0
        number = 1 + numbers[tensor.untyped_storage()._cdata]
        return (number << _BUFFER_BITS) + int(tensor.storage_offset()) * tensor.itemsize

    return find_kernel(isa(), call.kernel).pack(call.operands(), address), constants


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two constants have the same content; NaN equals itself."""
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
