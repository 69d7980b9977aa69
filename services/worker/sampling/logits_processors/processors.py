"""All logits processors together: which rows of a step they change, and into what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_kernels import ops
from triptych_kernels.logit_index import TokenMasks
from triptych_services.worker.sampling.batch import to_device
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    AnyProcessor,
    ChangedRows,
    DirectProcessor,
    Flags,
    FusedProcessor,
    JudgingProcessor,
    LogitsProcessor,
    MaskingProcessor,
    OwnRow,
    SteppedProcessor,
)
from triptych_services.worker.sampling.params import LogitChange

P = TypeVar("P", bound=LogitsProcessor)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedLogits:
    """The logits of a step's changed rows."""

    logits: Tensor
    """[any, vocab_size] float32, a copy of the changed rows, or the step's own logits if they are only masked."""
    logits_rows: Tensor | None
    """[num_changed] int64 row of `logits` for each; None: all of them, in order."""
    masks: TokenMasks | None
    """Tokens that may come; None restricts no row."""
    slots: I64
    """[num_changed]"""
    device_rows: Tensor
    """[num_changed] int64 rows of the step's logits, on the rank's device."""
    faults: Sequence[tuple[RowError, Flags]]
    """Errors of rows to which the changes leave nothing to choose from, each with the rows of the step, [num_rows], to
    which it may apply; the first one counts."""


class Processors:
    """All logits processors, as one `SlotObserver` and one change of a step's logits."""

    def __init__(self, processors: Sequence[AnyProcessor]) -> None:
        self._all = tuple(processors)
        self._fused = tuple(each for each in processors if isinstance(each, FusedProcessor))
        self._unfused = tuple(each for each in processors if not isinstance(each, FusedProcessor))
        self._masking = tuple(each for each in self._unfused if isinstance(each, MaskingProcessor))
        self._judging = tuple(each for each in self._unfused if isinstance(each, JudgingProcessor))
        self._stepped = tuple(each for each in processors if isinstance(each, SteppedProcessor))
        self._with_history = tuple(each for each in processors if each.needs_history)

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        change = LogitChange.NEVER
        for processor in self._all:
            change = max(change, processor.enter(slot, params))
        return change

    def leave(self, slot: int) -> None:
        for processor in self._all:
            processor.leave(slot)

    def begin_step(self, slots: I64, device: torch.device) -> None:
        """Prepare for a step; see `SteppedProcessor`."""
        for processor in self._stepped:
            processor.begin_step(slots, device)

    def take_mask_ns(self) -> int:
        """Return the time spent on masks since the last call."""
        return sum(each.take_mask_ns() for each in self._stepped)

    def need_history(self, slots: I64) -> bool:
        """Return whether the ids of one of these slots are read, and not only their number."""
        return any(each.find_rows(slots) is not None for each in self._with_history)

    def change(self, logits: Tensor, chosen: Tensor, slots: I64) -> tuple[Tensor, ChangedLogits | None]:
        """Return the tokens that are chosen already, and the logits of the rows that choose anew, or None if none does.

        The tokens are [num_rows], `chosen` itself where no other is known. See `Sampler.choose` for the arguments.
        """
        fused, unfused = _active(self._fused, slots), _active(self._unfused, slots)
        if unfused and chosen.device.type == "cpu":  # other devices would have to be waited for
            unfused, chosen = self._unsettled(fused, unfused, logits, chosen, slots)
        if not fused and not unfused:
            return chosen, None
        active: list[tuple[LogitsProcessor, Flags]] = [*fused, *unfused]
        rows = np.flatnonzero(reduce(np.logical_or, [flags for _, flags in active]))
        changed = ChangedRows(rows, slots[rows], logits.device)
        device_rows = to_device(rows, logits.device)
        masking = self._masking_of(unfused[-1][0]) if unfused else None
        last_own = () if masking is None else _own_rows(unfused.pop()[1], changed)
        logits_rows: Tensor | None = device_rows
        failed: list[tuple[int, RowError]] = []
        if fused or unfused:
            logits, failed = self._changed_copy(logits, device_rows, changed, fused, unfused)
            logits_rows = None
        masks = None
        if masking is not None:  # nothing changes after it
            bits, masking_failed = masking.masks(logits.shape[1], last_own)
            masks = _token_masks(bits, last_own, changed)
            failed += masking_failed.items()
        faults = [(error, np.arange(slots.size) == rows[row]) for row, error in failed]
        faults += [(each.fault, flags) for each, flags in reversed(active) if each.fault is not None]
        return chosen, ChangedLogits(logits, logits_rows, masks, changed.slots, device_rows, faults)

    def _changed_copy(
        self,
        logits: Tensor,
        device_rows: Tensor,
        changed: ChangedRows,
        fused: Sequence[tuple[FusedProcessor, Flags]],
        unfused: Sequence[tuple[MaskingProcessor | DirectProcessor, Flags]],
    ) -> tuple[Tensor, list[tuple[int, RowError]]]:
        """Return a changed copy of the changed rows, and the rows of it that failed, and why."""
        operands: dict[str, Any] = {
            processor.operand: processor.columns(changed, _own_rows(flags, changed))
            for processor, flags in fused
        }
        processed = ops.process_logits(logits, device_rows, **operands)
        failed: list[tuple[int, RowError]] = []
        for processor, flags in unfused:
            own = _own_rows(flags, changed)
            if isinstance(processor, MaskingProcessor):
                bits, errors = processor.masks(processed.shape[1], own)
                _forbid(processed, own, bits)
            else:
                errors = processor.apply(processed, changed, own)
            failed += errors.items()
        return processed, failed

    def _masking_of(self, processor: LogitsProcessor) -> MaskingProcessor | None:
        """Return a processor if it only masks. It is not asked what it is in each step, which takes microseconds."""
        return next((each for each in self._masking if each is processor), None)

    def _unsettled(
        self,
        fused: Sequence[tuple[LogitsProcessor, Flags]],
        unfused: Sequence[tuple[MaskingProcessor | DirectProcessor, Flags]],
        logits: Tensor,
        chosen: Tensor,
        slots: I64,
    ) -> tuple[list[tuple[MaskingProcessor | DirectProcessor, Flags]], Tensor]:
        """Return `unfused` without the rows of which the tokens are known, and the tokens; see `JudgingProcessor`."""
        changes = [flags for _, flags in (*fused, *unfused)]
        is_only = changes[0] if len(changes) == 1 else np.sum(changes, axis=0) == 1
        unsettled = []
        for processor, flags in unfused:
            judge = next((each for each in self._judging if each is processor), None)
            if judge is not None:
                own = np.flatnonzero(flags & is_only)
                settled, chosen = _settled(judge, own, slots[own], logits, chosen)
                flags = flags.copy()
                flags[settled] = False
            if flags.any():
                unsettled.append((processor, flags))
        return unsettled, chosen


def _settled(
    judge: JudgingProcessor, rows: I64, slots: I64, logits: Tensor, chosen: Tensor
) -> tuple[I64, Tensor]:
    """Return the rows of which the tokens are known, and all tokens, on a CPU."""
    first = chosen.numpy()[rows]
    token_ids = judge.settle(slots, first)
    is_known = token_ids >= 0
    others = np.flatnonzero(is_known & (token_ids != first))
    if others.size:
        is_known[others] = logits.numpy()[rows[others], token_ids[others]] > -np.inf
        tokens = chosen.numpy().copy()  # a cold processor needs 40 us for torch's
        tokens[rows[is_known]] = token_ids[is_known]
        chosen = torch.from_numpy(tokens)
    return rows[is_known], chosen


def _active(processors: Iterable[P], slots: I64) -> list[tuple[P, Flags]]:
    """Return the processors that change rows of these slots, each with the rows."""
    found = ((each, each.find_rows(slots)) for each in processors)
    return [(each, flags) for each, flags in found if flags is not None]


def _own_rows(flags: Flags, changed: ChangedRows) -> list[OwnRow]:
    """Return a processor's rows in the order of the changed ones; `flags` are those of all rows of the step."""
    rows = enumerate(zip(changed.slots.tolist(), flags[changed.rows].tolist(), strict=True))
    return [(row, slot) for row, (slot, is_own) in rows if is_own]


def _token_masks(bits: NDArray[np.uint32], own: Sequence[OwnRow], changed: ChangedRows) -> TokenMasks:
    """Return the masks of the changed rows, of which only the rows `own` have one."""
    row_to_number = {row: number for number, (row, _) in enumerate(own)}
    numbers = np.array([row_to_number.get(row, -1) for row in range(changed.rows.size)], np.int32)
    return TokenMasks(to_device(numbers, changed.device), to_device(bits.view(np.int32), changed.device))


def _forbid(logits: Tensor, own: Sequence[OwnRow], bits: NDArray[np.uint32]) -> None:
    """Write -inf to the tokens of the rows `own` that their masks lack."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    forbidden = to_device(allowed == 0, logits.device)
    rows = to_device(np.array([row for row, _ in own]), logits.device)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
