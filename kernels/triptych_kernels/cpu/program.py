"""A forward pass that is recorded once and run with one call, without Python between its kernels.

A model is run on the meta device, where tensors have shapes and no memory. Each native op appends its kernel to the
recording instead of computing. Views cost nothing. What torch computes beside them is recorded where there is a kernel
for it (`torch_ops`); anything else ends the recording, since it would be missing when the program runs. Then all
buffers are placed in one piece of memory, where those that are not needed at the same time share their bytes.

From step to step only the numbers of rows and the content of the inputs change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triptych_kernels.cpu.call_list import ADDRESS_BYTES, Ahead, CallList, PackedCall, PackedStage
from triptych_kernels.cpu.fusion import (
    StagedCall,
    chain_calls,
    fuse_calls,
    narrow_residuals,
    panels_of,
    reads_chosen_weights,
)
from triptych_kernels.cpu.launch import Operand, find_kernel, recorders
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.cpu.recording import (
    Buffer,
    NotRecordable,
    Recording,
    check_same,
    check_same_outputs,
)
from triptych_kernels.cpu.torch_ops import ALLOCATIONS, KeepConstants, RecordTorch, base_name, storages
from triptych_kernels.weights.packed import PackedWeight

_ALIGNMENT = 64  # bytes: a cache line, and a vector


@dataclass(frozen=True, slots=True)
class _Lifetime:
    """A buffer of the program, and the calls between which it is in use."""

    identity: int
    num_bytes: int
    first: int
    """Number of the call that fills it."""
    last: int
    """Number of the last call that reads it."""


class Program:
    """Recorded calls with all addresses filled in. Owned by one thread."""

    def __init__(self, recording: Recording, outputs: Sequence[Tensor]) -> None:
        """
        Args:
            outputs: Stand-ins that keep their content until the next run.
        Raises:
            NotRecordable: No call fills one of them.
        """
        calls, buffers = recording.calls, recording.buffers
        if recording.more_rows is not None:  # torch has computed
            inputs = [identity for identity, buffer in buffers.items() if buffer.memory is not None]
            kept = {*inputs, *(output.untyped_storage()._cdata for output in outputs)}
            calls = narrow_residuals(chain_calls(calls, kept), kept)
        fused = fuse_calls(calls, buffers)
        operands = [list(call.operands()) for call in fused]
        for output in outputs:
            if output.untyped_storage()._cdata not in buffers:
                raise NotRecordable(f"no recorded call has filled the output of {tuple(output.shape)}")
        size, offsets = _place(_lifetimes(buffers, operands, outputs))
        self._memory = zeros_in_huge_pages((size + _ALIGNMENT,), torch.uint8)
        # the system backs a page when a step is first that large, so address space for the longest step costs nothing
        base = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        tensors = (value for each in operands for fields in each for value in fields.values())
        self._kept = ([tensor for tensor in tensors if isinstance(tensor, Tensor)], dict(buffers))

        def address(tensor: Tensor) -> int:
            if tensor.device.type != "meta":
                return tensor.data_ptr()
            storage = tensor.untyped_storage()._cdata
            memory = buffers[storage].memory
            start = base + offsets[storage] if memory is None else memory.data_ptr()
            return start + int(tensor.storage_offset()) * tensor.itemsize

        ahead = _look_ahead([fields[-1] for fields in operands])
        self.calls: Sequence[PackedCall] = [
            _pack(call, fields, address, weight)
            for call, fields, weight in zip(fused, operands, ahead, strict=True)
        ]
        """Calls in their order, with addresses of this process."""
        self._list = CallList(self.calls)

        def view(output: Tensor) -> Tensor:
            shape = list(output.shape)
            if recording.more_rows is not None:  # then it has more rows than there may be
                place = recording.locate("an output", output)
                shape[place.axis] -= place.group * recording.more_rows(place.count)
            buffer = buffers[output.untyped_storage()._cdata]
            memory = self._memory if buffer.memory is None else buffer.memory.flatten().view(torch.uint8)
            first = (address(output) - memory.data_ptr()) // output.itemsize * output.itemsize
            elements = memory[first : first + (memory.nbytes - first) // output.itemsize * output.itemsize]
            return elements.view(output.dtype).as_strided(shape, output.stride())

        self.outputs = tuple(view(output) for output in outputs)
        """[most rows, …] each; a run fills the first rows."""

    def __len__(self) -> int:
        """Return the number of kernel calls."""
        return len(self.calls)

    @property
    def num_bytes(self) -> int:
        """Bytes of address space of the buffers; the system backs those that steps write."""
        return self._memory.nbytes

    @property
    def memory(self) -> Tensor:
        """Memory of the buffers."""
        return self._memory

    @property
    def operands(self) -> Sequence[Tensor]:
        """Tensors with memory of their own that the calls read or write: weights, tables, caches."""
        return self._kept[0]

    def run(self, counts: Mapping[str, int]) -> None:
        """Compute from the content of the inputs.

        Args:
            counts: Name of each number of rows -> its value.
        Raises:
            MemoryError: The system has no memory for what a kernel needs while it runs; the outputs are undefined.
        """
        self._list.run(counts)

    def run_in_child(self, counts: Mapping[str, int]) -> str:
        """Compute in a child process, lose its outputs, and return how it ended, as `CallList.run_in_child`."""
        return self._list.run_in_child(counts)

    def run_call(self, number: int, counts: Mapping[str, int]) -> None:
        """Run one of `calls`, after those before it."""
        self._list.run(counts, number, number + 1)


def record(forward: Callable[[Recording], Sequence[Tensor]]) -> Program:
    """Record what `forward` computes from inputs that it declares with `Recording.input`.

    Args:
        forward: Returns the outputs of the program.
    Raises:
        NotRecordable: It computes something outside of the native kernels; names it.
    """
    recording, mode = Recording(), _NoticeTorch()
    try:
        with _recording_into(recording), mode:
            outputs = forward(recording)
    except _MeetsTorch:
        pass
    if mode.has_met_torch:
        return _record_torch(forward)
    return Program(recording, outputs)


def _record_torch(forward: Callable[[Recording], Sequence[Tensor]]) -> Program:
    """Record a forward pass in which torch computes.

    It is recorded with two numbers of rows, so that nothing in it depends on them: one row more than the inputs have,
    since a single row could not be told from other axes of one element; and two.
    """
    packed: dict[object, tuple[Tensor, PackedWeight]] = {}
    recording = Recording(more_rows=lambda count: 1)
    outputs = _run_recorded(forward, recording, packed)
    fewest = recording.fewest_rows()
    other = Recording(more_rows=lambda count: 1 + (2 - fewest[count] if fewest[count] > 2 else 1))
    other_outputs = _run_recorded(forward, other, packed)
    check_same(recording, other)
    check_same_outputs(recording, outputs, other, other_outputs)
    return Program(recording, outputs)


def _run_recorded(
    forward: Callable[[Recording], Sequence[Tensor]],
    recording: Recording,
    packed: dict[object, tuple[Tensor, PackedWeight]],
) -> Sequence[Tensor]:
    with torch.no_grad(), _recording_into(recording), KeepConstants(), RecordTorch(recording, packed):
        return forward(recording)


@contextmanager
def _recording_into(recording: Recording) -> Iterator[None]:
    recorders.append(recording)
    try:
        yield
    finally:
        recorders.pop()


class _MeetsTorch(BaseException):
    """Ends a recording of native ops alone. It is not for the model to catch."""


class _NoticeTorch(TorchDispatchMode):
    """A mode in which torch makes only views and empty tensors, and stops at anything else.

    Some operations, `reshape` among them, are called views and copy where the strides do not allow a view.
    """

    has_met_torch = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which saves the import of torch's compiler, a second of start-up; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_allocation = base_name(func) in ALLOCATIONS
        if func.is_view or is_allocation:
            result = func(*args, **(kwargs or {}))
            if is_allocation or storages(result) <= storages((args, kwargs)):
                return result
        self.has_met_torch = True
        raise _MeetsTorch


def _pack(
    staged: StagedCall,
    fields: Sequence[Mapping[str, Operand]],
    address: Callable[[Tensor], int],
    ahead: Ahead | None,
) -> PackedCall:
    """Return a call with its addresses.

    Args:
        fields: Operands of each stage, then those of the call itself.
    """
    kernel = find_kernel(isa(), staged.call.kernel)
    stages = tuple(
        PackedStage(stage.kernel, find_kernel(isa(), stage.kernel).pack(operands, address), stage.count)
        for stage, operands in zip(staged.stages, fields, strict=False)
    )
    return PackedCall(
        kernel.name,
        kernel.pack(fields[-1], address),
        staged.call.count,
        stages,
        kernel.fields.index(staged.stages_field) * ADDRESS_BYTES if stages else 0,
        ahead,
    )


def _look_ahead(operands: Sequence[Mapping[str, Operand]]) -> list[Ahead | None]:
    """Return, for each product and for the first call, the weight that is read next.

    None: that is known only when the call runs.
    """
    found: list[Ahead | None] = [None] * len(operands)
    ahead: Ahead | None = None
    for number in reversed(range(len(operands))):
        weight = panels_of(operands[number])
        has_weights = weight is not None or reads_chosen_weights(operands[number])
        if has_weights or number == 0:
            found[number] = ahead
        if has_weights:
            ahead = weight
    return found


def _lifetimes(
    buffers: Mapping[int, Buffer],
    operands: Sequence[Sequence[Mapping[str, Operand]]],
    outputs: Sequence[Tensor],
) -> list[_Lifetime]:
    """Return when the program's own buffers are in use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    used = [[value for fields in each for value in fields.values()] for each in operands]
    for number, tensors in enumerate([*used, outputs]):
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                identity = tensor.untyped_storage()._cdata
                first.setdefault(identity, number)
                last[identity] = number
    return [
        _Lifetime(identity, buffer.num_bytes, first[identity], last[identity])
        for identity, buffer in buffers.items()
        if buffer.memory is None and identity in first
    ]


def _place(lifetimes: Sequence[_Lifetime]) -> tuple[int, dict[int, int]]:
    """Return the end of the last buffer, and the offset of each by its identity.

    Buffers are placed from the largest to the smallest, each at the lowest offset that is free while it is in use.
    """
    placed: list[tuple[int, _Lifetime]] = []
    for own in sorted(lifetimes, key=lambda lifetime: -lifetime.num_bytes):
        offset = 0
        for start, other in placed:  # ascending by offset
            if other.last < own.first or own.last < other.first:
                continue
            if offset + own.num_bytes <= start:
                break
            offset = max(offset, _aligned(start + other.num_bytes))
        placed.append((offset, own))
        placed.sort(key=lambda item: item[0])
    end = max((offset + own.num_bytes for offset, own in placed), default=0)
    return end, {own.identity: offset for offset, own in placed}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
