"""Follows the worker's rows through a journal's plans: the work of each row in a step, and its cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.config.step_times import StepWork
from triptych.types.journal import Planned, ResultTaken, WorkerReady
from triptych.types.step import NewRow, StepPlan, StepResult
from triptych.types.submit import SubmitRequest
from triptych.wire.columns import check_equal_lengths
from triptych.wire.journal import read_journal

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfStep:
    """The rows that compute in one step: columns of equal length, in ascending slot order."""

    slots: Ints
    query_lens: Ints
    """Tokens that each computes, >= 1."""
    seq_lens: Ints
    """Tokens that each has after the step."""
    is_prefill: NDArray[np.bool_]
    """Whether each computes tokens that were known when it entered, rather than tokens sampled since."""
    token_counts: Ints
    """Tokens that each got; 0 for a row that does not sample, and for one that failed."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step that a worker computed: how much, and how long it took."""

    work: StepWork
    compute_ns: int
    """Prepare, forward and sample."""


class SessionRows:
    """The live slots of one worker session, as its steps describe them. Holds counts, no tokens."""

    def __init__(self) -> None:
        self._is_live = np.zeros(0, np.bool_)
        self._computed: Ints = np.zeros(0, np.int64)
        self._known: Ints = np.zeros(0, np.int64)
        self._num_entered_with: Ints = np.zeros(0, np.int64)

    def take(self, plan: StepPlan, result: StepResult) -> RowsOfStep:
        """Follow the next step of the session, and return the rows that it computes.

        Raises:
            ProtocolViolation: The result is of another number of rows.
        """
        self._is_live[plan.removed_slots] = False
        for row in plan.new_rows:
            self._enter(row)
        query_lens = np.ones(len(self._is_live), np.int64)
        query_lens[plan.chunk_slots] = plan.chunk_lengths
        query_lens[plan.skipped_slots] = 0
        slots = np.flatnonzero(self._is_live & (query_lens > 0))
        query_lens = query_lens[slots]
        starts = self._computed[slots]
        seq_lens = starts + query_lens
        self._computed[slots] = seq_lens
        is_sampling = seq_lens == self._known[slots]
        token_counts = is_sampling.astype(np.int64)
        if len(result.token_counts):
            check_equal_lengths(sampling_rows=slots[is_sampling], token_counts=result.token_counts)
            token_counts[is_sampling] = result.token_counts
        known = np.maximum(token_counts[is_sampling], 1)  # a row that failed goes on until it is removed
        self._known[slots[is_sampling]] += known
        self._computed[slots[is_sampling]] += known - 1
        return RowsOfStep(slots, query_lens, seq_lens, starts < self._num_entered_with[slots], token_counts)

    def _enter(self, row: NewRow) -> None:
        if (lacking := row.slot + 1 - len(self._is_live)) > 0:
            self._is_live = np.append(self._is_live, np.zeros(lacking, np.bool_))
            self._computed = np.append(self._computed, np.zeros(lacking, np.int64))
            self._known = np.append(self._known, np.zeros(lacking, np.int64))
            self._num_entered_with = np.append(self._num_entered_with, np.zeros(lacking, np.int64))
        self._is_live[row.slot] = True
        self._computed[row.slot] = row.num_computed_tokens
        self._known[row.slot] = self._num_entered_with[row.slot] = row.num_known_tokens


class RowNames:
    """Finds the requests that the slots of a session belong to.

    A row does not name its request, so it is found by its content. Requests of one prompt and one seed get the same
    tokens, and are named together.
    """

    def __init__(self) -> None:
        self._content_to_ids: defaultdict[tuple[int, bytes], list[str]] = defaultdict(list)
        self._slot_to_name: dict[int, str] = {}

    def note_submit(self, request: SubmitRequest) -> None:
        prompt = request.prompt_token_ids.tobytes()
        for choice, seed in enumerate(request.seeds.tolist()):
            name = (
                request.head.request_id if request.num_choices == 1 else f"{request.head.request_id}#{choice}"
            )
            self._content_to_ids[seed, prompt].append(name)

    def note_rows(self, rows: Iterable[NewRow]) -> None:
        """Record the new rows of one plan or several."""
        for row in rows:
            self._slot_to_name[row.slot] = self.name_of(row)

    def name_of(self, row: NewRow) -> str:
        ids = self._content_to_ids.get((row.seed, row.content.prompt_token_ids.tobytes()), ())
        return " or ".join(ids) if ids else "a request that was never submitted"

    def in_slot(self, slot: int) -> str:
        """Return the request that entered this slot last."""
        return self._slot_to_name.get(slot, "no request")


def read_measured_steps(path: Path) -> Iterator[MeasuredStep]:
    """Iterate over the steps of a journal that were answered, in order. Raises as `JournalReader` does."""
    rows, plans = SessionRows(), dict[int, StepPlan]()
    for event in read_journal(path):
        match event.what:
            case WorkerReady():
                rows, plans = SessionRows(), {}
            case Planned(StepPlan() as plan):
                plans[plan.step_id] = plan
            case ResultTaken(result) if (answered := plans.pop(result.step_id, None)) is not None:
                timings = result.timings
                compute_ns = timings.prepare_ns + timings.forward_ns + timings.sample_ns
                yield MeasuredStep(_work_of(rows.take(answered, result)), compute_ns)


def _work_of(step: RowsOfStep) -> StepWork:
    return StepWork(
        num_prefill_tokens=int(step.query_lens[step.is_prefill].sum()),
        num_decode_rows=int(np.count_nonzero(~step.is_prefill)),
        num_context_tokens=int(step.seq_lens.sum()),
    )
