"""The streams to and from an asynchronous device: inputs, kernels, results. The only user of streams and events.

host      pack n | launch n | pack n+1 | launch n+1 |           take n        | pack n+2 …
copies           [inputs n]            [inputs n+1]
compute                    [step n                ][step n+1                ]
                                                   ^ tokens n arrive
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.generic]

_NUM_BLOCKS = (
    2  # one is read by the step that computes while the next step's inputs are copied into the other
)
_ALIGNMENT = 64  # bytes, of each result; a cache line
_LEAST_RESULT_BYTES = 1 << 16  # the tokens of 8,192 rows


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """The times of one step, in ns on the device's clock; 0 if not measured."""

    busy_ns: int = 0
    """Time from the first kernel to the last."""
    gap_ns: int = 0
    """Time since the last kernel of the step before."""


class ReadBack(Protocol):
    """Tensors that are being copied to the host."""

    def is_done(self) -> bool: ...

    def wait(self) -> tuple[tuple[Array, ...], DeviceTimes]:
        """Wait for the copy. Return the values, in their own memory, and the times of the step that computed them."""
        ...


class DeviceStream(Protocol):
    """Owned by the runner's thread. Per step: `host_block`, `upload`, kernels, `read_back`."""

    device: torch.device

    def reserve(self, num_bytes: int) -> None:
        """Make the blocks as large as the longest step; called once, before anything else."""
        ...

    def host_block(self) -> NDArray[np.uint8]:
        """Return the block for the next step's inputs; its earlier content has arrived on the device."""
        ...

    def upload(self, num_bytes: int) -> Tensor:
        """Copy the first bytes of the block to the device, uint8.

        Kernels that are launched afterwards find them there. Only those of this step may read them.
        """
        ...

    def read_back(self, tensors: tuple[Tensor, ...]) -> ReadBack:
        """Launch the copy of some of the step's tensors to the host; the last launch of the step."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ResultBlock:
    """One step's results in the host's memory."""

    memory: Tensor
    """uint8"""
    parts: tuple[Tensor, ...]
    """Views of it, one for each tensor."""


class ResultBlocks:
    """Host memory that the results of steps arrive in: a block that has been read serves a later step.

    Pinned memory is expensive to allocate, since the allocation waits for the device. There are as many blocks as
    steps in flight at most.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> ResultBlock:
        """Return memory for some tensors, in their shapes and dtypes. It belongs to the caller until `read`."""
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < starts[-1]:
            num_bytes = max(_LEAST_RESULT_BYTES, 1 << (starts[-1] - 1).bit_length())
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        parts = (
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        )
        return ResultBlock(memory, tuple(parts))

    def read(self, block: ResultBlock) -> tuple[Array, ...]:
        """Return the values that have arrived in a block, in their own memory."""
        values = tuple(part.numpy().copy() for part in block.parts)
        self._free.append(block.memory)
        return values


class CudaStream:
    """The `DeviceStream` of a CUDA device; kernels are those launched on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)
        self._results = ResultBlocks(pinned=True)
        self._blocks: list[_Block] = []
        self._turn = 0
        self._started = torch.cuda.Event()  # recorded where a step begins, behind all the kernels before it
        self._first_kernel: torch.cuda.Event | None = None
        self._last_kernel: torch.cuda.Event | None = None

    def reserve(self, num_bytes: int) -> None:
        self._blocks = [_Block(num_bytes, self.device) for _ in range(_NUM_BLOCKS)]

    def host_block(self) -> NDArray[np.uint8]:
        self._turn = (self._turn + 1) % _NUM_BLOCKS
        block = self._blocks[self._turn]
        block.copied.synchronize()
        return block.numpy

    def upload(self, num_bytes: int) -> Tensor:
        block, compute = self._blocks[self._turn], torch.cuda.current_stream(self.device)
        # Where the step before begins, all kernels of the one that read this block are done.
        self._copies.wait_event(self._started)
        with torch.cuda.stream(self._copies):
            block.on_device[:num_bytes].copy_(block.on_host[:num_bytes], non_blocking=True)
            block.copied.record(self._copies)
        self._started = torch.cuda.Event()
        self._started.record(compute)
        compute.wait_event(block.copied)
        self._first_kernel = torch.cuda.Event(enable_timing=True)
        self._first_kernel.record(compute)
        return block.on_device[:num_bytes]

    def read_back(self, tensors: tuple[Tensor, ...]) -> ReadBack:
        compute = torch.cuda.current_stream(self.device)
        first, before = self._first_kernel, self._last_kernel
        assert first is not None, "a step begins with `upload`"
        last = self._last_kernel = torch.cuda.Event(enable_timing=True)
        last.record(compute)
        on_host = self._results.take(tensors)
        for part, tensor in zip(on_host.parts, tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # waiting leaves the core to the event loop
        arrived.record(compute)
        return _CudaReadBack(self._results, on_host, arrived, first, last, before)


class _Block:
    """Pinned memory and its counterpart on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.numpy: NDArray[np.uint8] = self.on_host.numpy()
        self.copied = torch.cuda.Event()


@dataclass(frozen=True, slots=True, eq=False)
class _CudaReadBack:
    results: ResultBlocks
    on_host: ResultBlock
    arrived: torch.cuda.Event
    first: torch.cuda.Event
    last: torch.cuda.Event
    before: torch.cuda.Event | None
    """Last kernel of the step before, None of the first one."""

    def is_done(self) -> bool:
        return self.arrived.query()

    def wait(self) -> tuple[tuple[Array, ...], DeviceTimes]:
        self.arrived.synchronize()
        times = DeviceTimes(
            busy_ns=_nanoseconds(self.first, self.last),
            gap_ns=_nanoseconds(self.before, self.first) if self.before is not None else 0,
        )
        return self.results.read(self.on_host), times


def _nanoseconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)
