"""One step's sampling after the first choice: changed logits, log-probabilities, rows that failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.step import LogprobColumns, RowError
from triptych_kernels import ops
from triptych_services.worker.sampling.batch import gather_sampling, to_device
from triptych_services.worker.sampling.logits_processors.base import AnyProcessor, Flags
from triptych_services.worker.sampling.logits_processors.processors import Processors
from triptych_services.worker.sampling.params import (
    NO_LOGPROBS,
    SamplingColumns,
    TokenHistory,
)
from triptych_services.worker.sampling.sampled import NOT_FINITE, SampledTokens, SamplingPlaces

I64 = NDArray[np.int64]


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
    """Tokens that a step samples, on the rank's device; work may still be in flight."""

    first: Tensor
    """[num_rows] int64, chosen among the logits as they are."""
    token_ids: Tensor
    """[num_rows] int64; `first` itself where no row changes its logits. -1: nothing to choose from."""
    logprobs: LogprobTensors | None = None
    faults: Sequence[tuple[RowError, Flags]] = ()
    """Errors of rows to which changes of their logits leave nothing to choose from, each with the rows, [num_rows], to
    which it may apply; the first one counts."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the values that `Sampler.read` takes, in its order."""
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

    def __init__(
        self,
        columns: SamplingColumns,
        history: TokenHistory,
        processors: Sequence[AnyProcessor],
    ) -> None:
        """
        Args:
            columns: Columns without requests so far.
            processors: Processors in the order in which they apply; they follow the requests of `columns` from now on.
        """
        self._columns = columns
        self._history = history
        self._processors = Processors(processors)
        columns.observer = self._processors

    def needs_history(self, slots: I64) -> bool:
        """Return whether `choose` reads the tokens of one of these rows, and not only their number."""
        return bool(self._columns.demanding) and self._processors.need_history(slots)

    def take_mask_ns(self) -> int:
        """Return the time spent on masks of forms since the last call."""
        return self._processors.take_mask_ns()

    def finish(self, logits: Tensor, chosen: Tensor, slots: I64) -> SampledTokens:
        """Choose, wait for the device, and read. The arguments are those of `choose`."""
        if not self._columns.demanding:
            token_ids: I64 = chosen.numpy(force=True).copy()
            if not token_ids.size or token_ids.min() >= 0:
                return SampledTokens(token_ids, None, ())  # the common case
        choice = self.choose(logits, chosen, slots)
        return self.read(choice, [tensor.numpy(force=True).copy() for tensor in choice.tensors])

    def finish_places(
        self, logits: Tensor, chosen: Tensor, slots: I64, places: SamplingPlaces
    ) -> SampledTokens:
        """Choose at the positions of a step in which some rows guess, and read the tokens up to the first wrong guess.

        Rows that ask for more than one choice among the logits as they are choose at one position after the other. So
        their processors take in only tokens that the row has got, and each of them once.

        Args:
            logits: [num_places, vocab_size] float32; never written.
            chosen: [num_places] tokens among the logits as they are. Their device is waited for.
            slots: [num_rows] slot of each row.
        """
        token_ids: I64 = chosen.numpy(force=True).copy()  # [num_places]; -1: nothing to choose from
        known_before = self._history.num_known[slots]
        errors: dict[int, RowError] = {}
        reported: list[tuple[LogprobColumns, I64]] = []
        demanding = self._columns.demanding
        rows = np.array([row for row, slot in enumerate(slots.tolist()) if slot in demanding], np.int64)
        offset = 0
        while rows.size:
            at = places.first[rows] + offset
            # one row is not copied
            taken = slice(at[0], at[0] + 1) if at.size == 1 else to_device(at, logits.device)
            sampled = self.finish(logits[taken], chosen[taken], slots[rows])
            token_ids[at] = sampled.token_ids
            if sampled.logprobs is not None:
                reported.append((sampled.logprobs, at))
            for row, error in sampled.failures:
                token_ids[at[row]] = -1
                errors.setdefault(int(rows[row]), error)
            rows = rows[token_ids[at] == places.guesses[at]]
            self._history.num_known[slots[rows]] += 1
            offset += 1
        self._history.num_known[slots] = known_before
        return places.sampled(token_ids, reported, errors)

    def choose(self, logits: Tensor, chosen: Tensor, slots: I64) -> ChosenTokens:
        """Return the next token of each slot: the one given, or another where the request changes its logits.

        The device is not waited for.

        Args:
            logits: [num_rows, vocab_size] float32; never written.
            chosen: [num_rows] tokens among the logits as they are, see `SamplingBatch.choose`.
            slots: [num_rows] slot of each row.
        """
        if not self._columns.demanding:
            return ChosenTokens(chosen, chosen)
        self._processors.begin_step(slots, logits.device)
        token_ids, changed = self._processors.change(logits, chosen, slots)
        if changed is None:
            return ChosenTokens(chosen, token_ids, self._launch_logprobs(logits, token_ids, slots))
        batch = gather_sampling(self._columns, self._history, changed.slots, logits.device)
        chosen_anew = batch.choose(changed.logits, rows=changed.logits_rows, masks=changed.masks)
        token_ids = _with_rows(token_ids, changed.device_rows, chosen_anew)
        return ChosenTokens(
            chosen, token_ids, self._launch_logprobs(logits, token_ids, slots), changed.faults
        )

    def read(self, choice: ChosenTokens, values: Sequence[NDArray[np.generic]]) -> SampledTokens:
        """Return the tokens and what failed.

        Args:
            values: Values of `choice.tensors`; they become the result's own.
        """
        token_ids: I64 = values[0]  # type: ignore[assignment]
        is_changed = choice.token_ids is not choice.first
        first: I64 = values[1] if is_changed else token_ids  # type: ignore[assignment]
        failures = dict.fromkeys(_unusable(first), NOT_FINITE)
        for row in _unusable(token_ids):
            fault = next((fault for fault, rows in choice.faults if rows[row]), NOT_FINITE)
            failures.setdefault(row, fault)
        token_ids[list(failures)] = 0
        logprobs = None
        if choice.logprobs is not None:
            logprobs = _read_logprobs(choice.logprobs, values[1 + is_changed :], failures)
        return SampledTokens(token_ids, logprobs, tuple((row, failures[row]) for row in sorted(failures)))

    def _launch_logprobs(self, logits: Tensor, token_ids: Tensor, slots: I64) -> LogprobTensors | None:
        """Return log-probabilities before any change for the rows that asked, or None if none did."""
        num_top = self._columns.num_logprobs[slots]  # [num_rows]
        rows = np.flatnonzero(num_top != NO_LOGPROBS)
        if not rows.size:
            return None
        num_top = np.minimum(num_top[rows], logits.shape[1])
        device_rows = to_device(rows, logits.device)
        # a row that failed has no token; it is dropped when it is read
        chosen = token_ids.index_select(0, device_rows).clamp_min(0)
        chosen_logprobs, ranks, top_ids, top_logprobs = ops.token_logprobs(
            logits, device_rows, chosen, int(num_top.max())
        )
        best = LogprobTensors(rows, num_top, chosen, chosen_logprobs, ranks, top_ids, top_logprobs)
        slot_to_ids = self._columns.slot_to_logprob_ids
        if not slot_to_ids:
            return best
        asked = enumerate(slots[rows].tolist())
        named = [(place, slot_to_ids[slot]) for place, slot in asked if slot in slot_to_ids]
        return _with_named_tokens(best, named, logits) if named else best


def _with_rows(token_ids: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
    """Return [num_rows] tokens of which those of some rows are replaced by the ones chosen for them."""
    if token_ids.device.type != "cpu":
        return token_ids.index_copy(0, rows, chosen)
    replaced = token_ids.numpy().copy()  # a cold processor needs 5 us, and 40 for torch's
    replaced[rows.numpy()] = chosen.numpy()
    return torch.from_numpy(replaced)


def _with_named_tokens(
    best: LogprobTensors, named: Sequence[tuple[int, I64]], logits: Tensor
) -> LogprobTensors:
    """Replace the best tokens of some rows by tokens that their requests have named.

    Args:
        best: The log-probabilities with the best tokens of each row.
        named: Place of each of these rows in `best`, and its ids.
        logits: [num_rows, vocab_size] float32
    """
    places, counts = [place for place, _ in named], [ids.size for _, ids in named]
    num_top = best.num_top.copy()
    num_top[places] = counts
    flat_places = np.repeat(places, counts)  # [total], like the next two
    columns = np.concatenate([np.arange(count) for count in counts])
    ids = np.concatenate([ids for _, ids in named])
    device = logits.device
    at, column, token_ids = (to_device(each, device) for each in (flat_places, columns, ids))
    rows = to_device(best.rows[flat_places], device)
    # log p(a) - log p(b) is the difference of their logits
    distances = logits[rows, token_ids] - logits[rows, best.chosen.index_select(0, at)]
    num_more = max(max(counts) - best.top_ids.shape[1], 0)
    top_ids = torch.nn.functional.pad(best.top_ids, (0, num_more))
    top_logprobs = torch.nn.functional.pad(best.top_logprobs, (0, num_more))
    top_ids.index_put_((at, column), token_ids.to(top_ids.dtype))
    top_logprobs.index_put_((at, column), best.chosen_logprobs.index_select(0, at) + distances)
    return replace(best, num_top=num_top, top_ids=top_ids, top_logprobs=top_logprobs)


def _read_logprobs(
    logprobs: LogprobTensors, values: Sequence[NDArray[np.generic]], failures: Collection[int]
) -> LogprobColumns | None:
    """Return those of the rows that did not fail, or None if none is left."""
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
    """Return the rows for which `ops.sample` found nothing to choose from."""
    rows: list[int] = np.flatnonzero(token_ids < 0).tolist()
    return rows


def _side_by_side(first: NDArray[np.generic], rest: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return [rows, 1 + n] from [rows] and [rows, n]."""
    return np.concatenate((first[:, None], rest), axis=1)
