"""Joins recorded calls: those that compute the same elements, and those that make rows with the call that reads them.

The second kind makes the rows itself as it comes to them; see stages.h.

    rms_norm, quantized_linear                       ->  quantized_linear with one stage
    rotary_embedding, write_kv, paged_attention      ->  paged_attention with two

Each row goes through the same functions as before, so its bits stay, and what a stage makes is there for later calls,
too. What falls away is a wait for all threads after each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych_kernels.cpu.call_list import Ahead
from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, find_kernel
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.pointwise import Pointwise, View
from triptych_kernels.cpu.recording import Buffer, Call, KernelCall
from triptych_kernels.weights.packed import panel_size

_MAKERS = {
    "linear": ("x", "stages"),
    "widened_linear": ("linear_x", "linear_stages"),
    "quantized_linear": ("linear_x", "linear_stages"),
    "coded_linear": ("linear_x", "linear_stages"),
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


def panels_of(fields: Mapping[str, Operand]) -> Ahead | None:
    """Return the panels that a product reads; None for other kernels."""
    weight, out_features = (
        fields.get(name, fields.get(f"linear_{name}")) for name in ("weight", "out_features")
    )
    if not isinstance(weight, Tensor) or not isinstance(out_features, int):
        return None
    num_panels = -(-out_features // panel_size())
    return Ahead(weight.data_ptr(), num_panels, weight.nbytes // num_panels)


def reads_chosen_weights(fields: Mapping[str, Operand]) -> bool:
    """Return whether a call reads weights that it chooses when it runs, as a mixture of experts does."""
    return "routing_logits" in fields


_LOOK_BACK = 4
"""Calls before the last one that a call may be chained to."""


def chain_calls(calls: Sequence[Call], kept: Collection[int]) -> list[Call]:
    """Return the calls with those that compute the same elements one after the other made one.

    A call moves before or behind others that have nothing to do with it.

    Args:
        kept: Storages that are read after the calls.
    """
    touched = [_storages(call) for call in calls]
    users: dict[int, set[int]] = {}
    for number, (read, written) in enumerate(touched):
        for storage in read | written:
            users.setdefault(storage, set()).add(number)

    def needed_beyond(own: set[int]) -> Callable[[int], bool]:
        return lambda storage: storage in kept or bool(users[storage] - own)

    def conflict(one: set[int], other: set[int]) -> bool:
        """Return whether calls must stay in their order."""
        return any(
            touched[a][1] & (touched[b][0] | touched[b][1]) or touched[a][0] & touched[b][1]
            for a in one
            for b in other
        )

    chains: list[tuple[Call, set[int]]] = []
    for number, call in enumerate(calls):
        for index in range(len(chains) - 1, max(len(chains) - 2 - _LOOK_BACK, -1), -1):
            chain, own = chains[index]
            if not isinstance(chain, Pointwise) or not isinstance(call, Pointwise):
                continue
            joined, members = chain.followed_by(call), own | {number}
            if joined is None or not joined.storing(needed_beyond(members)).fits():
                continue
            between = set().union(*(others for _, others in chains[index + 1 :]))
            if not conflict({number}, between):
                chains[index] = joined, members
                break
            if not conflict(own, between):
                del chains[index]
                chains.append((joined, members))
                break
        else:
            chains.append((call, {number}))
    return [call.storing(needed_beyond(own)) if isinstance(call, Pointwise) else call for call, own in chains]


_NORMS = {"rms_norm": "", "layer_norm": "norm_"}
"""Kernel that takes a residual -> what the fields of `Norm` in norm.cpp begin with."""


def narrow_residuals(calls: Sequence[Call], kept: Collection[int]) -> list[Call]:
    """Return the calls in which norms read a residual as it was before it became float32, and leave out unread sums.

    Conversions that nothing reads any more are left out, too. No bit changes: bfloat16 becomes float32 exactly.

    Args:
        kept: Storages that are read after the calls.
    """
    writers = Counter(storage for call in calls for storage in _storages(call)[1])
    read = set(kept).union(*(_storages(call)[0] for call in calls))
    widened: dict[int, View] = {}
    narrowed: list[Call] = []
    for call in calls:
        if isinstance(call, Pointwise) and (source := call.widens()) is not None:
            target = call.outputs[0].storage
            if writers[target] == 1 and writers[source.storage] <= 1:
                widened[target] = source
        if isinstance(call, KernelCall) and call.kernel in _NORMS:
            call = _with_narrow_residual(call, widened, read)
        narrowed.append(call)
    read = set(kept).union(*(_storages(call)[0] for call in narrowed))
    return [
        call
        for call in narrowed
        if not isinstance(call, Pointwise) or call.widens() is None or call.outputs[0].storage in read
    ]


def _with_narrow_residual(norm: KernelCall, widened: Mapping[int, View], read: Collection[int]) -> KernelCall:
    prefix, fields = _NORMS[norm.kernel], dict(norm.fields)
    residual, total = fields[f"{prefix}residual"], fields[f"{prefix}sum"]
    if not isinstance(residual, Tensor) or not isinstance(total, Tensor):
        return norm
    source = widened.get(residual.untyped_storage()._cdata)
    if source is not None and source.row_stride == residual[0].numel():
        fields[f"{prefix}residual"] = source.tensor
        fields[f"{prefix}residual_dtype"] = DTYPES[torch.bfloat16]
    if total.untyped_storage()._cdata not in read:
        fields[f"{prefix}sum"] = None
    return replace(norm, fields=fields)


def _storages(call: Call) -> tuple[set[int], set[int]]:
    """Return the storages that a call reads, and those that it may write."""
    if isinstance(call, Pointwise):
        return call.storages
    writable = find_kernel(isa(), call.kernel).writable
    read, written = set[int](), set[int]()
    for name, operand in call.operands().items():
        if isinstance(operand, Tensor):
            (written if name in writable else read).add(operand.untyped_storage()._cdata)
    return read, written
