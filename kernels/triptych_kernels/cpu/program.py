"""A forward pass that is recorded once and run with one call, without Python between its kernels.

A model is run on the meta device, where tensors have shapes and no memory. Each native op appends its kernel to the
recording instead of computing. Views cost nothing. Anything else that torch computes ends the recording, since it would
be missing when the program runs. Then all buffers are placed in one piece of memory, where those that are not needed at
the same time share their bytes.

From step to step only the numbers of rows and the content of the inputs change.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triptych_kernels.cpu.launch import Operand, find_kernel, recorders
from triptych_kernels.cpu.library import isa, load, raise_failure
from triptych_kernels.cpu.memory import zeros_in_huge_pages

_ALIGNMENT = 64  # bytes: a cache line, and a vector
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class NotRecordable(Exception):
    """A model computes something that no native kernel does, which the message names."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """A storage on the meta device, and the calls between which it is in use."""

    keep: torch.UntypedStorage
    """The storage itself, kept so that no other one gets its identity."""
    count: str
    """Name of the step's number that counts its rows."""
    num_bytes: int
    first: int
    """Number of the call that fills it."""
    last: int
    """Number of the last call that reads it."""
    memory: Tensor | None = None
    """Memory of an input; None for buffers of the program."""
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    kernel: str
    count: str
    operands: Mapping[str, Operand]


class _CallStruct(ctypes.Structure):
    """`Call` in run.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("count_index", ctypes.c_int64),
    )


@dataclass(slots=True, eq=False)
class Recording:
    """The calls of one forward pass so far; see `record`."""

    _calls: list[_Call] = field(default_factory=list)
    _buffers: dict[int, _Buffer] = field(default_factory=dict)
    """Identity of a storage -> its buffer."""

    def input(self, memory: Tensor, *, count: str) -> Tensor:
        """Return a stand-in on the meta device for `memory`, which the program reads when it runs.

        Args:
            memory: [most rows, …], filled by the caller before each run.
            count: Name of the number of its rows.
        """
        stand_in = torch.empty(memory.shape, dtype=memory.dtype, device="meta")
        storage = stand_in.untyped_storage()
        self._buffers[storage._cdata] = _Buffer(storage, count, 0, 0, 0, memory=memory)
        return stand_in

    def append(self, kernel: str, rows: Tensor, operands: Mapping[str, Operand], filled_like: Tensor) -> None:
        """Record one call. Storages not seen before are its results, with as many rows as `filled_like`.

        Raises:
            NotRecordable: It reads a tensor, or takes a number of rows from one, that no recorded call has filled.
        """
        count, filled_count = self._count_of(kernel, rows), self._count_of(kernel, filled_like)
        number, writable = len(self._calls), find_kernel(isa(), kernel).writable
        for name, operand in operands.items():
            if not isinstance(operand, Tensor) or operand.device.type != "meta":
                continue
            storage = operand.untyped_storage()
            if storage._cdata not in self._buffers and name not in writable:
                raise NotRecordable(f"{kernel}: no recorded call has filled its operand {name}")
            known = self._buffers.setdefault(
                storage._cdata, _Buffer(storage, filled_count, storage.nbytes(), number, number)
            )
            known.last = number
        self._calls.append(_Call(kernel, count, operands))

    def _count_of(self, kernel: str, tensor: Tensor) -> str:
        buffer = self._buffers.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            raise NotRecordable(f"{kernel}: its rows come from outside of the recording")
        return buffer.count

    def finish(self, outputs: Sequence[Tensor]) -> Program:
        """Return the program that fills `outputs`, which keep their content until the next run."""
        for output in outputs:
            self._buffers[output.untyped_storage()._cdata].last = len(self._calls)
        return Program(self._calls, self._buffers, outputs)


class Program:
    """Recorded calls with all addresses filled in. Owned by one thread."""

    def __init__(
        self, calls: Sequence[_Call], buffers: Mapping[int, _Buffer], outputs: Sequence[Tensor]
    ) -> None:
        self._memory = zeros_in_huge_pages((_place(list(buffers.values())) + _ALIGNMENT,), torch.uint8)
        # the system backs a page when a step is first that large, so address space for the longest step costs nothing
        base = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._kept = (
            [o for call in calls for o in call.operands.values() if isinstance(o, Tensor)],
            dict(buffers),
        )
        self._count_names = tuple(dict.fromkeys(call.count for call in calls))
        self._structs = (_CallStruct * len(calls))()
        self._packed: list[ctypes.Array[ctypes.c_char]] = []

        def address(tensor: Tensor) -> int:
            if tensor.device.type != "meta":
                return tensor.data_ptr()
            buffer = buffers[tensor.untyped_storage()._cdata]
            start = base + buffer.offset if buffer.memory is None else buffer.memory.data_ptr()
            return start + int(tensor.storage_offset()) * tensor.itemsize

        for struct, call in zip(self._structs, calls, strict=True):
            kernel = find_kernel(isa(), call.kernel)
            packed = ctypes.create_string_buffer(kernel.pack(call.operands, address))
            self._packed.append(packed)
            struct.kernel = ctypes.cast(kernel.function, ctypes.c_void_p)
            struct.arguments = ctypes.addressof(packed)
            struct.count_index = self._count_names.index(call.count)
        self._counts = (ctypes.c_int64 * len(self._count_names))()
        self._run = load(isa()).triptych_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._run.restype = ctypes.c_int64

        def view(output: Tensor) -> Tensor:
            offset = address(output) - self._memory.data_ptr()
            return self._memory[offset : offset + output.nbytes].view(output.dtype).view(output.shape)

        self.outputs = tuple(view(output) for output in outputs)
        """[most rows, …] each; a run fills the first rows."""

    def __len__(self) -> int:
        """Return the number of kernel calls."""
        return len(self._structs)

    @property
    def num_bytes(self) -> int:
        """Bytes of address space of the buffers; the system backs those that steps write."""
        return self._memory.nbytes

    def run(self, counts: Mapping[str, int]) -> None:
        """Compute from the content of the inputs.

        Args:
            counts: Name of each number of rows -> its value.
        Raises:
            MemoryError: The system has no memory for what a kernel needs while it runs; the outputs are undefined.
        """
        for i, name in enumerate(self._count_names):
            self._counts[i] = counts[name]
        raise_failure(self._run(self._structs, len(self._structs), self._counts), "a recorded step")

    def run_in_child(self, counts: Mapping[str, int]) -> str:
        """Compute in a child process, lose its outputs, and return how it ended; empty if it ended well.

        The native kernels must have one thread.
        """
        for i, name in enumerate(self._count_names):
            self._counts[i] = counts[name]
        run = load(isa()).triptych_run_in_child
        run.argtypes, run.restype = self._run.argtypes, self._run.restype
        ending = int(run(self._structs, len(self._structs), self._counts))
        if ending > 0:
            return f"dies by {signal.Signals(ending).name}"
        return {0: "", -1: "has no child process to run in"}.get(ending, "does not end")


def record(forward: Callable[[Recording], Sequence[Tensor]]) -> Program:
    """Record what `forward` computes from inputs that it declares with `Recording.input`.

    Args:
        forward: Returns the outputs of the program.
    Raises:
        NotRecordable: It computes something outside of the native kernels; names it.
    """
    recording = Recording()
    with _recording_into(recording), _RefuseOthers():
        outputs = forward(recording)
    return recording.finish(outputs)


@contextmanager
def _recording_into(recording: Recording) -> Iterator[None]:
    recorders.append(recording)
    try:
        yield
    finally:
        recorders.pop()


class _RefuseOthers(TorchDispatchMode):
    """A mode in which torch makes only views and empty tensors.

    Some operations, `reshape` among them, are called views and copy where the strides do not allow a view.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which saves the import of torch's compiler, a second of start-up; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        is_allocation = name.partition(".")[0] in _ALLOCATIONS
        if not func.is_view and not is_allocation:
            raise NotRecordable(f"{name} has no native kernel")
        result = func(*args, **(kwargs or {}))
        if not is_allocation and not _storages(result) <= _storages((args, kwargs)):
            raise NotRecordable(f"{name} copies here, and a copy has no native kernel")
        return result


def _storages(value: Any) -> set[int]:
    """Return the identities of the storages of all tensors in nested sequences and mappings."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


def _place(buffers: Sequence[_Buffer]) -> int:
    """Give every buffer its offset and return the end of the last one.

    Buffers are placed from the largest to the smallest, each at the lowest offset that is free while it is in use.
    """
    placed: list[_Buffer] = []
    for buffer in sorted((b for b in buffers if b.memory is None), key=lambda b: -b.num_bytes):
        offset = 0
        for other in placed:  # ascending by offset
            if other.last < buffer.first or buffer.last < other.first:
                continue
            if offset + buffer.num_bytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.num_bytes))
        buffer.offset = offset
        placed.append(buffer)
        placed.sort(key=lambda b: b.offset)
    return max((b.offset + b.num_bytes for b in placed), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
