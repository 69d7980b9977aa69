"""One step's sampling after the first choice: changed logits, log-probabilities, rows that failed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.batch import gather_sampling
from services.worker.sampling.columns import NO_LOGPROBS, SamplingColumns, TokenHistory
from services.worker.sampling.processing import LogitChanges, gather_changes
from triptych.types.step import LogprobColumns
from triptych_kernels import ops

I64 = NDArray[np.int64]

NOT_FINITE = "the model's logits hold NaN or infinity"
NOTHING_ALLOWED = (
    "sampling: min_tokens masks every token that allowed_token_ids names; allow another, or lower it"
)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """One token per sampling row, in the order of the slots given."""

    token_ids: I64
    """[num_rows]; 0 where the row failed."""
    logprobs: LogprobColumns | None
    """Of the rows that asked and did not fail."""
    failures: tuple[tuple[int, str], ...]
    """(row, why), ascending."""


class Sampler:
    """Owned by the runner; reads the columns and the history that its rows keep."""

    def __init__(self, columns: SamplingColumns, history: TokenHistory) -> None:
        self._columns = columns
        self._history = history

    def finish(self, logits: Tensor, chosen: Tensor, slots: I64) -> SampledTokens:
        """The next token of each slot: what was chosen, or another where the request changes its logits.

        Args:
            logits: [num_rows, vocab_size] float32; never written.
            chosen: [num_rows], of the logits as they are, see `SamplingBatch.choose`.
            slots: [num_rows], whose rows these are.
        """
        token_ids: I64 = chosen.numpy(force=True).copy()
        if not self._columns.demanding and (not token_ids.size or token_ids.min() >= 0):
            return SampledTokens(token_ids, None, ())  # the common case
        changes = gather_changes(self._columns, self._history, slots, logits.device)
        failures = dict.fromkeys(_unusable(token_ids), NOT_FINITE)
        if changes is not None:
            token_ids[changes.rows] = self._choose_changed(logits, slots[changes.rows], changes)
            for row in _unusable(token_ids):
                failures.setdefault(row, NOTHING_ALLOWED)
        token_ids[list(failures)] = 0
        logprobs = self._gather_logprobs(logits, token_ids, slots, failures)
        return SampledTokens(token_ids, logprobs, tuple(sorted(failures.items())))

    def _choose_changed(self, logits: Tensor, slots: I64, changes: LogitChanges) -> I64:
        """One token per changed row, whose slots these are."""
        processed = ops.process_logits(
            logits,
            torch.from_numpy(changes.rows).to(logits.device),
            allowed=changes.allowed,
            banned=changes.banned,
            biases=changes.biases,
            penalties=changes.penalties,
        )
        batch = gather_sampling(self._columns, self._history, slots, logits.device)
        chosen: I64 = batch.choose(processed).numpy(force=True)
        return chosen

    def _gather_logprobs(
        self, logits: Tensor, token_ids: I64, slots: I64, failures: Collection[int]
    ) -> LogprobColumns | None:
        """Log-probabilities before any change, for the rows that asked; None if none did."""
        num_top = self._columns.num_logprobs[slots]  # [num_rows]
        asked = num_top != NO_LOGPROBS
        asked[list(failures)] = False
        rows = np.flatnonzero(asked)
        if not rows.size:
            return None
        num_top = np.minimum(num_top[rows], logits.shape[1])
        chosen = torch.from_numpy(token_ids[rows]).to(logits.device)
        chosen_logprobs, ranks, top_ids, top_logprobs = ops.token_logprobs(
            logits, torch.from_numpy(rows).to(logits.device), chosen, int(num_top.max())
        )
        # [rows asked, 1 + the largest num_top]: the chosen token, then the best; each row keeps its own number
        kept = np.arange(1 + top_ids.shape[1]) <= num_top[:, None]
        offsets = np.zeros(rows.size + 1, np.uint32)
        np.cumsum(1 + num_top, out=offsets[1:])
        return LogprobColumns(
            rows=rows.astype(np.uint32),
            offsets=offsets,
            token_ids=_side_by_side(chosen, top_ids)[kept].astype(np.uint32),
            logprobs=_side_by_side(chosen_logprobs, top_logprobs)[kept].astype(np.float32, copy=False),
            ranks=ranks.numpy(force=True).astype(np.uint32),
        )


def _unusable(token_ids: I64) -> list[int]:
    """The rows that `ops.sample` made nothing of."""
    rows: list[int] = np.flatnonzero(token_ids < 0).tolist()
    return rows


def _side_by_side(first: Tensor, rest: Tensor) -> NDArray[np.number]:
    """[rows], [rows, n] -> [rows, 1 + n], on the host."""
    return torch.cat((first[:, None], rest), dim=1).numpy(force=True)
