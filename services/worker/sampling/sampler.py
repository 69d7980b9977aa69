"""One step's sampling after the first choice: changed logits, log-probabilities, rows that failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.batch import gather_sampling, to_device
from services.worker.sampling.logits_processing import LogitChanges, gather_changes
from services.worker.sampling.params import NO_LOGPROBS, SamplingColumns, TokenHistory
from triptych.types.step import LogprobColumns, RowError
from triptych_kernels import ops

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOT_FINITE = RowError("the model's logits hold NaN or infinity")
NOTHING_ALLOWED = RowError.of_client(
    "sampling: min_tokens masks every token that allowed_token_ids names; allow another token, or lower it"
)
PENALTY_OVERFLOWS = RowError.of_client(
    "sampling.repetition_penalty: it makes logits infinite; set it nearer to 1, where it changes nothing"
)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """One token per sampling row, in the order of the slots given."""

    token_ids: I64
    """[num_rows]; 0 where the row failed."""
    logprobs: LogprobColumns | None
    """Of the rows that asked and did not fail."""
    failures: tuple[tuple[int, RowError], ...]
    """(row, why), ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Log-probabilities of the rows that asked, as `ops.token_logprobs` gives them; work may still be in flight."""

    rows: I64
    """[num_asked] rows of the logits."""
    num_top: NDArray[np.int32]
    """[num_asked] alternatives that each asked for."""
    chosen: Tensor
    """[num_asked] int64."""
    chosen_logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    """[num_asked, largest num_top]"""
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """What a step samples, on the rank's device; work may still be in flight."""

    first: Tensor
    """[num_rows] int64, chosen among the logits as they are."""
    token_ids: Tensor
    """[num_rows] int64; `first` itself where no row changes its logits. -1: nothing to choose from."""
    logprobs: LogprobTensors | None = None
    is_penalized: Flags | None = None
    """[num_rows] whose penalties, and no mask, leave nothing to choose from where that is so; None: nobody's."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What `Sampler.read` needs the values of, in its order."""
        tensors: tuple[Tensor, ...] = (self.token_ids,)
        if self.token_ids is not self.first:
            tensors += (self.first,)
        if (logprobs := self.logprobs) is not None:
            tensors += (
                logprobs.chosen,
                logprobs.chosen_logprobs,
                logprobs.ranks,
                logprobs.top_ids,
                logprobs.top_logprobs,
            )
        return tensors


class Sampler:
    """Owned by the runner; reads the columns and the history that its rows keep."""

    def __init__(self, columns: SamplingColumns, history: TokenHistory) -> None:
        self._columns = columns
        self._history = history

    def needs_history(self, slots: I64) -> bool:
        """Whether `choose` reads the tokens of one of these rows, and not only their number."""
        return bool(self._columns.slot_to_counts) and bool(self._columns.has_penalties[slots].any())

    def finish(self, logits: Tensor, chosen: Tensor, slots: I64) -> SampledTokens:
        """`choose`, then `read`, waiting for the device in between; arguments as of `choose`."""
        if not self._columns.demanding:
            token_ids: I64 = chosen.numpy(force=True).copy()
            if not token_ids.size or token_ids.min() >= 0:
                return SampledTokens(token_ids, None, ())  # the common case
        choice = self.choose(logits, chosen, slots)
        return self.read(choice, [tensor.numpy(force=True).copy() for tensor in choice.tensors])

    def choose(self, logits: Tensor, chosen: Tensor, slots: I64) -> ChosenTokens:
        """The next token of each slot: what was chosen, or another where the request changes its logits. The device
        is not waited for.

        Args:
            logits: [num_rows, vocab_size] float32; never written.
            chosen: [num_rows], of the logits as they are, see `SamplingBatch.choose`.
            slots: [num_rows], whose rows these are.
        """
        if not self._columns.demanding:
            return ChosenTokens(chosen, chosen)
        token_ids, is_penalized = chosen, None
        changes = gather_changes(self._columns, self._history, slots, logits.device)
        if changes is not None:
            token_ids = self._choose_changed(logits, chosen, slots[changes.rows], changes)
            is_penalized = self._columns.has_penalties[slots] & ~self._columns.restricts[slots]
        logprobs = self._launch_logprobs(logits, token_ids, slots)
        return ChosenTokens(chosen, token_ids, logprobs, is_penalized)

    def read(self, choice: ChosenTokens, values: Sequence[NDArray[np.generic]]) -> SampledTokens:
        """The tokens and what failed.

        Args:
            values: of `choice.tensors`; they become the result's own.
        """
        token_ids: I64 = values[0]  # type: ignore[assignment]
        is_changed = choice.token_ids is not choice.first
        first: I64 = values[1] if is_changed else token_ids  # type: ignore[assignment]
        failures = dict.fromkeys(_unusable(first), NOT_FINITE)
        for row in _unusable(token_ids):
            is_penalized = choice.is_penalized is not None and bool(choice.is_penalized[row])
            failures.setdefault(row, PENALTY_OVERFLOWS if is_penalized else NOTHING_ALLOWED)
        token_ids[list(failures)] = 0
        logprobs = None
        if choice.logprobs is not None:
            logprobs = _read_logprobs(choice.logprobs, values[1 + is_changed :], failures)
        return SampledTokens(token_ids, logprobs, tuple((row, failures[row]) for row in sorted(failures)))

    def _choose_changed(self, logits: Tensor, chosen: Tensor, slots: I64, changes: LogitChanges) -> Tensor:
        """`chosen`, but for the changed rows, whose slots these are."""
        rows = to_device(changes.rows, logits.device)
        processed = ops.process_logits(
            logits,
            rows,
            allowed=changes.allowed,
            banned=changes.banned,
            biases=changes.biases,
            penalties=changes.penalties,
        )
        batch = gather_sampling(self._columns, self._history, slots, logits.device)
        return chosen.index_copy(0, rows, batch.choose(processed))

    def _launch_logprobs(self, logits: Tensor, token_ids: Tensor, slots: I64) -> LogprobTensors | None:
        """Log-probabilities before any change, for the rows that asked; None if none did."""
        num_top = self._columns.num_logprobs[slots]  # [num_rows]
        rows = np.flatnonzero(num_top != NO_LOGPROBS)
        if not rows.size:
            return None
        num_top = np.minimum(num_top[rows], logits.shape[1])
        device_rows = to_device(rows, logits.device)
        chosen = token_ids.index_select(0, device_rows).clamp_min(
            0
        )  # a row that failed is dropped when it is read
        chosen_logprobs, ranks, top_ids, top_logprobs = ops.token_logprobs(
            logits, device_rows, chosen, int(num_top.max())
        )
        return LogprobTensors(rows, num_top, chosen, chosen_logprobs, ranks, top_ids, top_logprobs)


def _read_logprobs(
    logprobs: LogprobTensors, values: Sequence[NDArray[np.generic]], failures: Collection[int]
) -> LogprobColumns | None:
    """Of the rows that did not fail; None if none is left."""
    succeeded = ~np.isin(logprobs.rows, list(failures))
    if not succeeded.any():
        return None
    chosen, chosen_logprobs, ranks, top_ids, top_logprobs = (value[succeeded] for value in values)
    rows, num_top = logprobs.rows[succeeded], logprobs.num_top[succeeded]
    # [rows asked, 1 + the largest num_top]: the chosen token, then the best; each row keeps its own number
    kept = np.arange(1 + top_ids.shape[1]) <= num_top[:, None]
    offsets = np.zeros(rows.size + 1, np.uint32)
    np.cumsum(1 + num_top, out=offsets[1:])
    return LogprobColumns(
        rows=rows.astype(np.uint32),
        offsets=offsets,
        token_ids=_side_by_side(chosen, top_ids)[kept].astype(np.uint32),
        logprobs=_side_by_side(chosen_logprobs, top_logprobs)[kept].astype(np.float32, copy=False),
        ranks=ranks.astype(np.uint32),
    )


def _unusable(token_ids: I64) -> list[int]:
    """The rows that `ops.sample` made nothing of."""
    rows: list[int] = np.flatnonzero(token_ids < 0).tolist()
    return rows


def _side_by_side(first: NDArray[np.generic], rest: NDArray[np.generic]) -> NDArray[np.generic]:
    """[rows], [rows, n] -> [rows, 1 + n]"""
    return np.concatenate((first[:, None], rest), axis=1)
