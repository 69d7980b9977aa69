"""Pooling of a runner's rows: each step's states of pooled rows, and the vectors of those that end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.types.pooling import PoolingParams
from triptych.types.step import F32, RowError, RowKey
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.pooling import PooledRow, PooledVectors, Pooler
from triptych_services.worker.runner.request_rows import RequestRows, StepRows


@dataclass(frozen=True, slots=True, eq=False)
class PooledPart:
    """The states of one row that a step computes and its vectors need."""

    key: RowKey
    params: PoolingParams
    row: PooledRow
    tokens: slice
    """Tokens of the step."""
    is_last: bool
    """Whether the row's vectors follow from it."""


class RowPooler:
    """Owned by the runner; reads its rows."""

    def __init__(self, rows: RequestRows) -> None:
        self._rows = rows

    @property
    def _pooler(self) -> Pooler:
        pooler = self._rows.pooled.pooler
        assert pooler is not None, "the rows let no pooled row pass without"
        return pooler

    def take_parts(self, step: StepRows) -> Sequence[PooledPart]:
        """Find the states that a step has for pooled rows, before it counts as computed.

        May be called again for the same step, or for some rows of it. Steps without such rows cost nothing.
        """
        slot_to_pooling = self._rows.pooled.slot_to_pooling
        if not slot_to_pooling:
            return ()
        parts: list[PooledPart] = []
        computed_lens = step.computed_lens
        first_tokens = np.cumsum(computed_lens) - computed_lens  # [num_rows]
        for index in np.flatnonzero(np.isin(step.slots, list(slot_to_pooling))).tolist():
            slot, start, length = (
                int(column[index]) for column in (step.slots, step.starts, step.query_lens)
            )
            entered = slot_to_pooling[slot]
            is_last = start + length == int(self._rows.num_prompt[slot])
            wanted = entered.row.wanted(start, length, is_last=is_last)
            first = int(first_tokens[index])
            if is_last or wanted.start < wanted.stop:
                tokens = slice(first + wanted.start, first + wanted.stop)
                parts.append(
                    PooledPart(self._rows.key_of(slot), entered.params, entered.row, tokens, is_last)
                )
        return parts

    def finish(self, output: StepOutput, parts: Sequence[PooledPart]) -> PooledVectors:
        """Wait for the device, and pool. The states may be overwritten afterwards."""
        hidden = output.hidden
        assert hidden is not None, "a pooled row does not sample"
        return self.read(parts, [hidden[part.tokens].float().numpy(force=True) for part in parts])

    def launch(self, output: StepOutput, parts: Sequence[PooledPart]) -> tuple[Tensor, ...]:
        """Select the states of the parts on the device, [num_states, hidden_size] float32 each.

        `read` takes their values.
        """
        hidden = output.hidden
        assert hidden is not None, "a pooled row does not sample"
        return tuple(hidden[part.tokens].to(torch.float32, copy=True) for part in parts)

    def read(self, parts: Sequence[PooledPart], states: Sequence[F32]) -> PooledVectors:
        """Pool the states of each part, in the order of the steps."""
        reported: dict[RowKey, F32] = {}
        failures: dict[RowKey, RowError] = {}
        for part, values in zip(parts, states, strict=True):
            if len(values):
                part.row.add(values)
            if not part.is_last:
                continue
            vectors = self._pooler.vectors(part.params, part.row)
            if isinstance(vectors, RowError):
                failures[part.key] = vectors
            else:
                reported[part.key] = vectors
        return PooledVectors(reported, failures)
