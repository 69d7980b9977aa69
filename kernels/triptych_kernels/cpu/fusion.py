"""Joins calls to the call after them, which then makes their rows itself as it comes to them; see stages.h.

    rms_norm, quantized_linear                       ->  quantized_linear with one stage
    rotary_embedding, write_kv, paged_attention      ->  paged_attention with two

Each row goes through the same functions as before, so its bits stay, and what a stage makes is there for later calls,
too. What falls away is a wait for all threads after each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels.cpu.launch import Operand, find_kernel
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.recording import Buffer, Call

_MAKERS = {
    "linear": ("x", "stages"),
    "widened_linear": ("linear_x", "linear_stages"),
    "quantized_linear": ("linear_x", "linear_stages"),
    "paged_attention": ("query", "stages"),
}
"""Kernel that makes rows -> the operand with the rows, and the field for the stages."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedCall:
    """A call, and those that it computes before it reads their rows."""

    call: Call
    stages: tuple[Call, ...] = ()

    @property
    def stages_field(self) -> str:
        """Name of the kernel's field for the stages."""
        return _MAKERS[self.call.kernel][1]

    def operands(self) -> Iterator[Mapping[str, Operand]]:
        """Yield the fields of each stage, then those of the call itself."""
        for call in (*self.stages, self.call):
            yield call.operands()


def fuse_calls(calls: Sequence[Call], buffers: Mapping[int, Buffer]) -> list[StagedCall]:
    """Return the calls in their order, each with the stages directly before it.

    Args:
        buffers: Identity of a storage -> its buffer.
    """
    fused: list[StagedCall] = []
    waiting: list[Call] = []
    for call in calls:
        if _is_stage(call) and all(other.count == call.count for other in waiting):
            waiting.append(call)
            continue
        if waiting and _makes(call, waiting[0].count, buffers):
            fused.append(StagedCall(call, tuple(waiting)))
            waiting = []
            continue
        fused += map(StagedCall, waiting)
        waiting = [call] if _is_stage(call) else []
        if not waiting:
            fused.append(StagedCall(call))
    return [*fused, *map(StagedCall, waiting)]


def _is_stage(call: Call) -> bool:
    return find_kernel(isa(), call.kernel).rows_function is not None


def _makes(call: Call, count: str, buffers: Mapping[int, Buffer]) -> bool:
    """Return whether a call can make rows of this number."""
    if call.kernel not in _MAKERS:
        return False
    rows = call.operands()[_MAKERS[call.kernel][0]]
    assert isinstance(rows, Tensor)
    return buffers[rows.untyped_storage()._cdata].count == count
