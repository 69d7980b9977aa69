"""The protocol of logits processors, and the parts that they share.

A step's logits are [num_rows, vocab_size]. The rows that some processor changes are copied once:

    slots of the step        3    5    6    9
    allowed ids                   x
    penalties                     x         x
    changed rows             .    0    .    1        apply to a copy, [num_changed, vocab_size]

`ops.process_logits` makes the copy and applies what `FusedProcessor`s contribute; then each `DirectProcessor` changes
the copy by itself. Masks and penalties commute, so it does not matter that the fused ones come first. What a
`MaskingProcessor` allows is left to the choice, `ops.sample`, unless another processor changes the copy after it: rows
that are only masked are not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_services.worker.sampling.batch import to_device
from triptych_services.worker.sampling.params import LogitChange

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]
OwnRow = tuple[int, int]
"""A row of the copy that a processor changes, and its slot."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """The rows of one step with logits that at least one processor changes."""

    rows: I64
    """[num_changed] rows of the step's logits, ascending."""
    slots: I64
    """[num_changed] slot of each."""
    device: torch.device


class LogitsProcessor(Protocol):
    """Changes the logits of the requests that ask for it. Owned by the `Sampler`.

    It depends on the request's parameters and on its tokens so far, and on nothing else: a request that was preempted
    enters again with its tokens and goes on as before. A step may be sampled twice, the second time with fewer rows.
    """

    @property
    def needs_history(self) -> bool:
        """Whether it reads the ids of a request's tokens, and not only their number."""

    @property
    def fault(self) -> RowError | None:
        """The error of a request to which it leaves no usable logit; None if it always leaves one."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        """Take in the request of an empty slot, and return when its logits will be changed."""

    def leave(self, slot: int) -> None:
        """Forget the request of a slot, if it has one that asks for anything."""

    def find_rows(self, slots: I64) -> Flags | None:
        """Return which rows of a step, [num_rows], it changes in this step, or None if it changes none.

        Args:
            slots: [num_rows] slot of each row.
        """


@runtime_checkable
class FusedProcessor(LogitsProcessor, Protocol):
    """A processor that `ops.process_logits` carries out."""

    @property
    def operand(self) -> str:
        """The argument of `ops.process_logits` that it contributes."""

    def columns(
        self, changed: ChangedRows, own: Sequence[OwnRow]
    ) -> TokenColumns | BiasColumns | PenaltyColumns:
        """Return the operand for the step.

        Args:
            own: The rows that it changes, ascending, at least one.
        """


class DirectProcessor(LogitsProcessor, Protocol):
    """A processor that changes logits by itself."""

    def apply(self, logits: Tensor, changed: ChangedRows, own: Sequence[OwnRow]) -> Mapping[int, RowError]:
        """Change some rows in place. The device is not waited for.

        Returns:
            Rows of the copy that it leaves without a usable logit because they failed, and why. An error counts before
            the `fault` of any processor.

        Args:
            logits: [num_changed, vocab_size] float32, a copy.
            own: The rows that it changes, ascending, at least one.
        """


@runtime_checkable
class MaskingProcessor(LogitsProcessor, Protocol):
    """A processor that only says which tokens may come."""

    def masks(
        self, vocab_size: int, own: Sequence[OwnRow]
    ) -> tuple[NDArray[np.uint32], Mapping[int, RowError]]:
        """Return a mask for each row, and the rows that it leaves without a token because they failed, and why.

        An error counts before the `fault` of any processor.

        Args:
            own: The rows that it masks, ascending, at least one.
        Returns:
            [num_own, vocab_size / 32 rounded up] bit t % 32 of word t // 32: token t may come.
        """


AnyProcessor = FusedProcessor | DirectProcessor | MaskingProcessor
"""It changes logits in one of these ways."""


@runtime_checkable
class JudgingProcessor(LogitsProcessor, Protocol):
    """A processor that only masks, and that can say for much less than a mask costs what it comes to.

    Where it alone would change a row and lets the first choice pass, no other token is better: the choice is kept.
    Where it knows that only one token may come, that one is chosen.
    """

    def settle(self, slots: I64, token_ids: I64) -> I64:
        """Return the tokens that slots choose under their masks, [num_slots]; -1 where that takes the mask to say.

        They may be ones that have no usable logit, and so cannot be chosen.

        Args:
            token_ids: [num_slots] best tokens among the logits as the model made them; negative: there is none.
        """


@runtime_checkable
class SteppedProcessor(LogitsProcessor, Protocol):
    """A processor that is called for each step that samples rows with parameters beyond the usual."""

    def begin_step(self, slots: I64, device: torch.device) -> None:
        """Prepare for a step. All ranks that sample its rows call this for the same steps.

        Args:
            slots: [num_rows] slot of each row.
            device: Device of the logits.
        """

    def take_mask_ns(self) -> int:
        """Return the time spent on masks since the last call."""


class SlotValues(Generic[T]):
    """A value for each of a few slots, with one look-up for all rows of a step."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slot_to_value: dict[int, T] = {}
        self._has_value: Flags = np.zeros(max_num_seqs, np.bool_)

    def __len__(self) -> int:
        return len(self._slot_to_value)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slot_to_value

    def __getitem__(self, slot: int) -> T:
        return self._slot_to_value[slot]

    def __setitem__(self, slot: int, value: T) -> None:
        self._slot_to_value[slot] = value
        self._has_value[slot] = True

    def discard(self, slot: int) -> None:
        """Drop the value of a slot, if it has one."""
        if self._slot_to_value.pop(slot, None) is not None:
            self._has_value[slot] = False

    def find_rows(self, slots: I64) -> Flags | None:
        """Return which of these slots, [num_rows], have a value, or None if none has."""
        if not self._slot_to_value:
            return None
        flags = self._has_value[slots]
        return flags if flags.any() else None


def token_columns(own: Sequence[OwnRow], ids: Sequence[I64], device: torch.device) -> TokenColumns:
    """Return entries for the token ids of each row; `ids` are those of the rows `own`."""
    return TokenColumns(row_column(own, ids, device), joined(ids, device))


def row_column(own: Sequence[OwnRow], ids: Sequence[I64], device: torch.device) -> Tensor:
    """Return the row of each token id, [total] int64, where `ids` are the token ids of the rows `own`."""
    return to_device(np.repeat([row for row, _ in own], [each.size for each in ids]), device)


def joined(parts: Sequence[NDArray[np.int64] | NDArray[np.float32]], device: torch.device) -> Tensor:
    """Return the parts one after the other, [total]."""
    return to_device(np.concatenate(parts), device)
