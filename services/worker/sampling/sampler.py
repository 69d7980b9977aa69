"""One step's sampling: logits of the rows that sample in, token ids and log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.columns import NO_LOGPROBS, SamplingColumns, TokenHistory
from services.worker.sampling.processing import NO_CHANGES, LogitChanges, gather_changes
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

    def sample(self, logits: Tensor, slots: I64) -> SampledTokens:
        """Choose the next token of each slot.

        Args:
            logits: [num_rows, vocab_size] float32; rows that fail are overwritten.
            slots: [num_rows], whose rows these are.
        """
        if not slots.size:
            return SampledTokens(np.empty(0, np.int64), None, ())
        failures: dict[int, str] = {}
        _fail_unusable(logits, NOT_FINITE, failures)
        changes = gather_changes(self._columns, self._history, slots, logits.device)
        if changes is NO_CHANGES and not self._columns.temperature[slots].any():
            tokens = logits.argmax(dim=-1)  # of equals the first: the rule of `ops.sample`
        else:
            tokens = self._sample_changed(logits, changes, slots, failures)
        logprobs = self._gather_logprobs(logits, tokens, slots, failures)
        token_ids = tokens.numpy(force=True)
        token_ids[list(failures)] = 0
        return SampledTokens(token_ids, logprobs, tuple(sorted(failures.items())))

    def _sample_changed(
        self, logits: Tensor, changes: LogitChanges, slots: I64, failures: dict[int, str]
    ) -> Tensor:
        processed = ops.process_logits(
            logits,
            allowed=changes.allowed,
            banned=changes.banned,
            biases=changes.biases,
            penalties=changes.penalties,
        )
        if changes.can_block:
            _fail_unusable(processed, NOTHING_ALLOWED, failures)
        columns = self._columns
        temperature, top_k, top_p, min_p, seeds, positions = (
            torch.from_numpy(column[slots]).to(logits.device)
            for column in (
                columns.temperature,
                columns.top_k,
                columns.top_p,
                columns.min_p,
                columns.seed,
                self._history.num_known,
            )
        )
        return ops.sample(
            processed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
        )

    def _gather_logprobs(
        self, logits: Tensor, tokens: Tensor, slots: I64, failures: dict[int, str]
    ) -> LogprobColumns | None:
        """Log-probabilities before any change, for the rows that asked; None if none did."""
        num_top = self._columns.num_logprobs[slots]  # [num_rows]
        asked = num_top != NO_LOGPROBS
        asked[list(failures)] = False
        rows = np.flatnonzero(asked)
        if not rows.size:
            return None
        num_top = np.minimum(num_top[rows], logits.shape[1])
        rows_on_device = torch.from_numpy(rows).to(logits.device)
        chosen = tokens[rows_on_device]
        chosen_logprobs, ranks, top_ids, top_logprobs = ops.token_logprobs(
            logits[rows_on_device], chosen, int(num_top.max())
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


def _fail_unusable(logits: Tensor, why: str, failures: dict[int, str]) -> None:
    """Note the rows whose largest logit is not finite, and zero them, so that what follows stays defined.

    A maximum carries NaN along, at a tenth of the cost of looking for it in every logit.
    """
    usable = torch.isfinite(logits.amax(dim=-1)).numpy(force=True)
    if usable.all():
        return
    for row in np.flatnonzero(~usable).tolist():
        logits[row] = 0.0
        failures.setdefault(row, why)


def _side_by_side(first: Tensor, rest: Tensor) -> NDArray[np.number]:
    """[rows], [rows, n] -> [rows, 1 + n], on the host."""
    return torch.cat((first[:, None], rest), dim=1).numpy(force=True)
