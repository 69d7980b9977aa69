"""The worker's memory of the requests that it serves: one row per slot, columns in numpy, changed only by plans.

    slot  token_ids            num_prompt  num_computed  num_known  tables[0]
    0     p p p p o o . . .    4           5             6          5 9 0 0
    1     p p p p p p p . .    7           4             7          2 3 0 0      in the middle of its prompt
    2     (not live)

`num_computed` chases `num_known`: a step computes positions `num_computed .. num_computed + n - 1`, and a
row that thereby reaches `num_known` samples: it gets the token of the next position, or of several. There are no
phases. A pooled row never samples: its vectors follow from the states of its prompt, and with all of that computed it
computes nothing until it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.facts import KvLayout, WorkerFacts
from triptych.types.pooling import GENERATION
from triptych.types.step import U32, NewRow, RowError, RowErrorCode, RowKey, StepPlan
from triptych_services.worker.adapters.slots import NO_ADAPTER, AdapterSlots, AdapterUnavailable
from triptych_services.worker.runner.block_tables import (
    GUESSING_SLOTS,
    append_new_blocks,
    create_tables,
    tables_of,
)
from triptych_services.worker.runner.pooling import PooledSlots
from triptych_services.worker.sampling.params import SamplingColumns, TokenHistory
from triptych_services.worker.sampling.sampled import SamplingPlaces

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows that a step computes, in ascending slot order."""

    slots: I64
    """[num_rows]"""
    query_lens: I64
    """[num_rows] known tokens that each computes, >= 1."""
    starts: I64
    """[num_rows] the position of the first of them."""
    samples: Flags
    """[num_rows] whether it reaches the end of what is known, and so samples."""
    sample_limits: I64 | None = None
    """[num_sampling] the most tokens that each may get; None: one each."""
    state_reads: I32 | None = None
    """[num_rows] page that each reads its state from if it is not that of its table; 0: it is. None: of all rows."""
    row_errors: Mapping[RowKey, RowError] = field(default_factory=dict)
    """Rows that entered in this step and cannot be served. They compute like any other until they are removed."""
    places: SamplingPlaces | None = None
    """The positions that sample, where some rows guess; None: the last token of each sampling row."""

    @property
    def sampling_slots(self) -> I64:
        return self.slots[self.samples]

    @property
    def computed_lens(self) -> I64:
        """[num_rows] tokens that each computes, guesses included."""
        if self.places is None:
            return self.query_lens
        computed_lens = self.query_lens.copy()
        computed_lens[self.samples] += self.places.counts
        return computed_lens

    def split(self) -> tuple[I64, I64, I64, Flags]:
        """Return slots, query lengths, starts and `samples` of the rows if each guess were a row of its own, which
        computes one token. Tokens stay in their order.
        """
        assert self.places is not None, "some rows guess"
        num_rows = np.ones(self.slots.size, np.int64)
        num_rows[self.samples] += self.places.counts
        row = np.repeat(np.arange(num_rows.size), num_rows)
        guess = np.arange(row.size) - (np.cumsum(num_rows) - num_rows)[row]  # 0: the row itself
        query_lens = self.query_lens[row]
        starts = self.starts[row] + np.where(guess > 0, query_lens + guess - 1, 0)
        return self.slots[row], np.where(guess > 0, 1, query_lens), starts, self.samples[row]

    def select(self, rows: Flags) -> StepRows:
        """Return the step of some of its rows, [num_rows]; all errors stay with it. No row guesses."""
        return replace(
            self,
            slots=self.slots[rows],
            query_lens=self.query_lens[rows],
            starts=self.starts[rows],
            samples=self.samples[rows],
            sample_limits=None if self.sample_limits is None else self.sample_limits[rows[self.samples]],
            state_reads=None if self.state_reads is None else self.state_reads[rows],
        )


class RowObserver(Protocol):
    """Follows the rows that generate as they enter and leave their slots."""

    def enter(self, row: NewRow) -> None: ...

    def leave(self, slot: int) -> None: ...


class RequestRows:
    """Owned by the runner's thread. Memory for tokens is reserved whole and backed when first written."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        kv: KvLayout,
        vocab_size: int,
        max_samples_per_row: int = 1,
        tasks: tuple[str, ...] = (GENERATION,),
        adapters: AdapterSlots | None = None,
    ) -> None:
        """
        Args:
            adapters: Slots of the rows' adapters; None: the worker serves none.
        """
        self.adapters = adapters
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_samples_per_row = max_samples_per_row
        self.live: Flags = np.zeros(max_num_seqs, np.bool_)
        self.slot_version: U32 = np.zeros(max_num_seqs, np.uint32)
        self.token_ids: I32 = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_prompt: I64 = np.zeros(max_num_seqs, np.int64)
        self.num_known: I64 = np.zeros(max_num_seqs, np.int64)
        self.num_computed: I64 = np.zeros(max_num_seqs, np.int64)
        self.write_start: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] positions below are in shared blocks and are never written."""
        self.tables = create_tables(kv, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        """[num_groups] the blocks of the rows, by group."""
        self._states = next((table for table in self.tables if table.is_state), None)
        self.num_replayed: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] computed tokens that the row's page of states lacks: the guesses of its latest step that were
        right. Zeros where there are no states."""
        self.num_guessing_slots = max_num_seqs if self._states is None else GUESSING_SLOTS
        """Rows of the slots from here on get one token in a step."""
        self._entered_in: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] the step with which the row entered."""
        self._sampled_in: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] the latest step of which the sample is recorded late; 0: none."""
        self._last_recorded = 0
        """The step up to which late samples have been recorded."""
        self.num_recorded: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] known tokens of which the ids are here. Of rows that `record` is called for: those that they
        entered with."""
        self.adapter_slots: I32 = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        """[max_num_seqs] slot of the row's adapter."""
        self.sampling = SamplingColumns(max_num_seqs=max_num_seqs, vocab_size=vocab_size)
        self.history = TokenHistory(self.token_ids, self.num_prompt, self.num_known)
        self.recorded_history = TokenHistory(self.token_ids, self.num_prompt, self.num_recorded)
        """The same without tokens that are recorded late, and have not been yet."""
        self.prompt_logprobs_start: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] positions of the prompt below this have been reported; only of slots in the map below."""
        self.slot_to_prompt_top: dict[int, int] = {}
        """Slot to the number of alternatives per prompt token, of rows with a prompt to be reported yet."""
        self.pooled = PooledSlots(max_num_seqs, tasks)
        self.observer: RowObserver | None = None
        """Guesses tokens of the rows ahead, if something does."""

    def apply(self, plan: StepPlan) -> StepRows:
        """Carry out a plan's removals, new rows and new blocks, and return the rows that it computes.

        Raises:
            ProtocolViolation: the plan contradicts the rows; they are undefined until `clear()`.
        """
        if plan.removed_slots.size:
            self._remove(plan.removed_slots)
        errors = {
            row.key: error for row in plan.new_rows if (error := self._enter(row, plan.step_id)) is not None
        }
        if plan.block_slots.size or plan.block_ids.size:
            self._append_blocks(plan)
        slots, query_lens = self._select(plan)
        starts = self.num_computed[slots]
        ends = starts + query_lens
        known = self.num_known[slots]
        samples = (ends == known) & ~self.pooled.never_sample[slots]
        is_unknown = ends > known
        num_tokens = int(query_lens.sum())
        sample_limits = None
        if plan.sample_slots.size or plan.sample_limits.size:
            sample_limits = self._read_sample_limits(plan, slots[samples], ends[samples] - 1)
            ends[samples] += sample_limits - 1
            num_tokens += int(sample_limits.sum()) - sample_limits.size
        self._check_reach(slots, ends, known, samples, is_unknown)
        if num_tokens > self.max_num_batched_tokens:
            raise ProtocolViolation(
                f"the step has {num_tokens} tokens; max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        state_reads = None
        if plan.state_slots.size or plan.state_pages.size:
            state_reads = self._replace_pages(plan, slots)
        return StepRows(slots, query_lens, starts, samples, sample_limits, state_reads, errors)

    def advance(self, step: StepRows, token_counts: I64 | None = None) -> None:
        """Count the step as computed, and its tokens as known: all of a row are computed but the last.

        The tokens' ids follow by `record`, or by `record_late` after `await_ids`: counts alone suffice to prepare
        the next step where the device itself keeps the last token of each row.

        Args:
            token_counts: [num_sampling] tokens that each sampling row got, >= 1; None: one each.
        """
        self.num_computed[step.slots] += step.query_lens
        if self._states is not None:
            self.num_replayed[step.slots] = 0
        if token_counts is None:
            self.num_known[step.sampling_slots] += 1
        else:
            self.num_known[step.sampling_slots] += token_counts
            self.num_computed[step.sampling_slots] += token_counts - 1
            if self._states is not None:
                self.num_replayed[step.sampling_slots] = token_counts - 1

    def record(self, step: StepRows, token_ids: NDArray[np.integer], token_counts: I64 | None = None) -> None:
        """Write the ids that the step sampled.

        Args:
            token_ids: [sum(token_counts)] those of each sampling row, one row after the other.
            token_counts: As of `advance`. All tokens of a row but the last were guessed, and so are written already.
        """
        positions = (step.starts + step.query_lens)[step.samples]
        if token_counts is not None:
            positions += token_counts - 1
            token_ids = token_ids[np.cumsum(token_counts) - 1]
        self.token_ids[step.sampling_slots, positions] = token_ids

    def await_ids(self, step: StepRows, step_id: int) -> None:
        """Note that the ids of this step's samples come later, by `record_late`."""
        self._sampled_in[step.sampling_slots] = step_id

    def awaits_id(self, slots: I64) -> Flags:
        """Return whether the id of each row's last known token is still to be recorded, [num_slots]."""
        return self._sampled_in[slots] > self._last_recorded

    def record_late(
        self,
        step: StepRows,
        step_id: int,
        token_ids: NDArray[np.integer],
        token_counts: I64 | None = None,
    ) -> Flags:
        """Record as `record` does, after later plans were applied. A slot that another row has entered since is left
        alone. Called in the order of the steps.

        Returns:
            [num_sampling] whether the row of the step is still in its slot, or none is.
        """
        slots = step.sampling_slots
        positions = (step.starts + step.query_lens)[step.samples]
        if token_counts is not None:
            positions += token_counts - 1
            token_ids = token_ids[np.cumsum(token_counts) - 1]
        same_row = self._entered_in[slots] <= step_id
        self.token_ids[slots[same_row], positions[same_row]] = token_ids[same_row]
        self.num_recorded[slots[same_row]] = positions[same_row] + 1
        self._last_recorded = step_id
        return same_row

    def rows_without_newest_prompts(self, step: StepRows) -> Flags | None:
        """Return which rows of a step, [num_rows], make a smaller one that can be computed in its place.

        Half of the rows with several tokens leave it, those that entered last, and with them every row that reads
        what one of them writes in this step. None: no smaller step is left.
        """
        prompts = np.flatnonzero(step.query_lens > 1)
        prompts = prompts[np.argsort(self._entered_in[step.slots[prompts]], kind="stable")]
        stays = np.ones(step.slots.size, np.bool_)
        stays[prompts[prompts.size // 2 :]] = False
        ends = step.starts + step.query_lens
        first_written = np.maximum(step.starts, self.write_start[step.slots])
        columns = step.slots.tolist(), step.starts.tolist(), first_written.tolist(), ends.tolist()
        spans = list(zip(*columns, strict=True))
        leaving = np.flatnonzero(~stays).tolist()
        while leaving:
            slot, _, first, end = spans[leaving.pop()]
            for table in self.tables:
                written = table.blocks_written(slot, first, end)
                for other in np.flatnonzero(stays).tolist():
                    reader, start, _, reader_end = spans[other]
                    if np.isin(table.blocks_read(reader, start, reader_end), written).any():
                        stays[other] = False
                        leaving.append(other)
        return stays if 0 < stays.sum() < stays.size else None

    def take_over(self, other: RequestRows) -> None:
        """Become a copy of other rows, of the same sizes and without log-probabilities or changed logits."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                array[...] = getattr(other, name)
        for table, of_other in zip(self.tables, other.tables, strict=True):
            table.take_over(of_other)
        self._last_recorded = other._last_recorded
        self.sampling.take_over(other.sampling)

    def clear(self) -> None:
        """Forget every row."""
        self._remove(np.flatnonzero(self.live))
        self._last_recorded = 0

    def key_of(self, slot: int) -> RowKey:
        """Return the key of the row that is in a slot."""
        return RowKey(slot, int(self.slot_version[slot]))

    def _remove(self, slots: NDArray[np.integer]) -> None:
        self._require_live(slots, "removed_slots")
        self.live[slots] = False
        for slot in slots.tolist():
            for table in self.tables:
                table.leave(slot)
            self.sampling.leave(slot)
            self._release_adapter(slot)
            self.slot_to_prompt_top.pop(slot, None)
            self.pooled.leave(slot)
            if self.observer is not None:
                self.observer.leave(slot)

    def _enter(self, row: NewRow, step_id: int) -> RowError | None:
        """Fill a slot. Returns why the row cannot be served, None if it can."""
        token_ids = row.token_ids
        self._check_new(row, token_ids)
        slot, num_known = row.slot, token_ids.size
        self.live[slot] = True
        self.slot_version[slot] = row.slot_version
        self.token_ids[slot, :num_known] = token_ids
        self.num_prompt[slot] = row.num_prompt_tokens
        self.num_known[slot] = self.num_recorded[slot] = num_known
        self.num_computed[slot] = row.num_computed_tokens
        self.write_start[slot] = row.num_cached_tokens
        self.num_replayed[slot] = 0
        for table, block_ids in zip(self.tables, tables_of(row, len(self.tables)), strict=True):
            table.enter(slot, block_ids)
        self._entered_in[slot], self._sampled_in[slot] = step_id, 0
        refusal = self._take_adapter(slot, row.content.adapter)
        if not self.pooled.samples(row):
            return self.pooled.enter(row, refusal)
        refusal = self.sampling.enter(slot, row.sampling, row.seed) or refusal
        if row.sampling.prompt_logprobs is not None and refusal is None:
            self.prompt_logprobs_start[slot] = row.prompt_logprobs_start
            self.slot_to_prompt_top[slot] = row.sampling.prompt_logprobs
        if self.observer is not None:
            self.observer.enter(row)
        return refusal

    def _take_adapter(self, slot: int, digest: str) -> RowError | None:
        """Note the slot of a row's adapter. Returns why it cannot be applied, None if it can."""
        if not digest:
            return None
        try:
            if self.adapters is None:
                raise AdapterUnavailable("worker.max_adapters is 0")
            self.adapter_slots[slot] = self.adapters.slot_of(digest)
        except AdapterUnavailable as error:
            # what such a row computes is that of the base: its KV must not be found under the adapter's name
            return RowError(f"adapter: {error}", RowErrorCode.INVALID_REQUEST)
        return None

    def _release_adapter(self, slot: int) -> None:
        if self.adapters is not None and self.adapter_slots[slot] != NO_ADAPTER:
            self.adapters.release(int(self.adapter_slots[slot]))
            self.adapter_slots[slot] = NO_ADAPTER

    def _check_new(self, row: NewRow, token_ids: U32) -> None:
        name = f"new_rows: slot {row.slot}"
        max_num_seqs, max_model_len = self.token_ids.shape
        if row.slot >= max_num_seqs:
            raise ProtocolViolation(f"{name} is not below max_num_seqs {max_num_seqs}")
        if self.live[row.slot]:
            raise ProtocolViolation(
                f"{name} is live with version {self.slot_version[row.slot]}; remove it first"
            )
        num_known, computed, cached = token_ids.size, row.num_computed_tokens, row.num_cached_tokens
        if not 0 < row.num_prompt_tokens <= num_known <= max_model_len:
            raise ProtocolViolation(
                f"{name} has {num_known} tokens, {row.num_prompt_tokens} of them prompt; "
                f"max_model_len is {max_model_len}"
            )
        if not (computed < num_known and computed <= cached <= computed + 1):
            raise ProtocolViolation(
                f"{name} has num_computed_tokens {computed} and num_cached_tokens {cached} of "
                f"{num_known} tokens; the first is below the last, the second equal or one more"
            )
        self.pooled.check(row)
        start = max(row.prompt_logprobs_start, 1)  # nothing predicts the first token
        if row.sampling.prompt_logprobs is not None and computed >= start < row.num_prompt_tokens:
            raise ProtocolViolation(
                f"{name} has num_computed_tokens {computed} and prompt_logprobs_start {start}; the first is below the "
                "second until the whole prompt has been reported"
            )
        if int(token_ids.max()) >= self.sampling.vocab_size:
            raise ProtocolViolation(
                f"{name} holds token id {token_ids.max()}; the vocabulary has {self.sampling.vocab_size}"
            )
        for table, block_ids in zip(self.tables, tables_of(row, len(self.tables)), strict=True):
            if table.is_state and cached != computed:
                raise ProtocolViolation(
                    f"{name} has num_computed_tokens {computed} and num_cached_tokens {cached}; they are equal in a "
                    "model with states, since a state holds all tokens before it"
                )
            table.check_new(row, block_ids)

    def _append_blocks(self, plan: StepPlan) -> None:
        """Append a plan's new blocks to the rows of their slots, keeping the order within each row."""
        slots, block_ids = plan.block_slots, plan.block_ids
        if slots.size != block_ids.size:
            raise ProtocolViolation(f"block_slots has {slots.size} entries, block_ids {block_ids.size}")
        self._require_live(slots, "block_slots", distinct=False)
        append_new_blocks(self.tables, plan)

    def _replace_pages(self, plan: StepPlan, computing_slots: I64) -> I32:
        """Give rows the pages of states that they go on with, and return the pages that they read, [num_rows]."""
        slots, pages = plan.state_slots, plan.state_pages
        if slots.size != pages.size:
            raise ProtocolViolation(f"state_slots has {slots.size} entries, state_pages {pages.size}")
        if self._states is None:
            raise ProtocolViolation(f"state_slots: {slots.tolist()}, and the model has no states")
        self._require_live(slots, "state_slots")
        if not np.isin(slots, computing_slots).all():
            raise ProtocolViolation(f"state_slots: {slots.tolist()} do not all compute a token")
        slot_to_page = np.zeros(self.live.size, np.int32)
        slot_to_page[slots] = self._states.replace_pages(slots, self.num_computed[slots], pages)
        return slot_to_page[computing_slots]

    def _select(self, plan: StepPlan) -> tuple[I64, I64]:
        """Return the computing slots, ascending, and how many known tokens each computes."""
        query_lens = self.live.astype(np.int64)
        self.pooled.skip_ended(query_lens, self.num_computed, self.num_known)
        if plan.chunk_slots.size != plan.chunk_lengths.size:
            raise ProtocolViolation(
                f"chunk_slots has {plan.chunk_slots.size} entries, chunk_lengths {plan.chunk_lengths.size}"
            )
        if plan.chunk_slots.size:
            self._require_live(plan.chunk_slots, "chunk_slots")
            if not plan.chunk_lengths.all():
                raise ProtocolViolation("chunk_lengths: 0 is not a length; name the slot in skipped_slots")
            query_lens[plan.chunk_slots] = plan.chunk_lengths
        if plan.skipped_slots.size:
            self._require_live(plan.skipped_slots, "skipped_slots")
            query_lens[plan.skipped_slots] = 0
        slots = np.flatnonzero(query_lens)
        return slots, query_lens[slots]

    def _read_sample_limits(self, plan: StepPlan, sampling_slots: I64, last_known: I64) -> I64:
        """Return the most tokens that each sampling row may get, [num_sampling].

        Args:
            last_known: [num_sampling] position of the last known token of each.
        """
        slots, limits = plan.sample_slots, plan.sample_limits
        if slots.size != limits.size:
            raise ProtocolViolation(f"sample_slots has {slots.size} entries, sample_limits {limits.size}")
        self._require_live(slots, "sample_slots")
        if not np.isin(slots, sampling_slots).all():
            raise ProtocolViolation(
                f"sample_slots: {slots.tolist()} do not all reach the end of what is known"
            )
        if not 2 <= limits.min() <= limits.max() <= self._max_samples_per_row:
            raise ProtocolViolation(
                f"sample_limits: {limits.min()}..{limits.max()} are not within 2..{self._max_samples_per_row}, "
                "max_samples_per_row"
            )
        slot_to_limit = np.ones(self.live.size, np.int64)
        slot_to_limit[slots] = limits
        sample_limits = slot_to_limit[sampling_slots]
        if self._states is None:
            return sample_limits
        return np.minimum(sample_limits, self._states.most_samples(sampling_slots, last_known))

    def _check_reach(self, slots: I64, ends: I64, known: I64, samples: Flags, is_unknown: Flags) -> None:
        """Raise ProtocolViolation for a row that computes a token that is not known, without a block, or past the end
        of its context.

        Args:
            ends: [num_rows] one more than the last position that each computes, with all tokens that it may get.
            is_unknown: [num_rows] whether the row's own length goes beyond what is known.
        """
        max_model_len = self.token_ids.shape[1]
        first_table, *others = self.tables
        capacity = first_table.num_held[slots] * first_table.block_size
        for table in others:
            capacity = np.minimum(capacity, table.num_held[slots] * table.block_size)
        checks = [
            (is_unknown, "more tokens than are known"),
            (ends > capacity, "more tokens than its blocks hold"),
            (samples & (ends >= max_model_len), f"a token past max_model_len {max_model_len}"),
        ]
        if self._states is not None:
            interval = self._states.block_size
            is_cut = self.num_computed[slots] // interval == (ends - 1) // interval
            checks.append((~is_cut, f"tokens of two blocks of states, each of {interval}"))
        for wrong, why in checks:
            if wrong.any():
                first = wrong.argmax()
                raise ProtocolViolation(
                    f"slot {slots[first]} would compute {why}: to position {ends[first]}, with {known[first]} known "
                    f"and blocks for {capacity[first]}"
                )

    def _require_live(self, slots: NDArray[np.integer], name: str, *, distinct: bool = True) -> None:
        if slots.size and int(slots.max()) >= self.live.size:
            raise ProtocolViolation(f"{name}: slot {slots.max()} is not below max_num_seqs {self.live.size}")
        live = self.live[slots]
        if not live.all():
            raise ProtocolViolation(f"{name}: slot {slots[~live][0]} is not live")
        if distinct and np.unique(slots).size != slots.size:
            raise ProtocolViolation(f"{name} names a slot twice: {slots.tolist()}")


def create_rows(facts: WorkerFacts, adapters: AdapterSlots | None = None) -> RequestRows:
    """Return rows for a worker with these facts.

    Args:
        adapters: As of `RequestRows`.
    """
    return RequestRows(
        max_num_seqs=facts.max_num_seqs,
        max_model_len=facts.model.max_model_len,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        kv=facts.kv,
        vocab_size=facts.model.vocab_size,
        max_samples_per_row=facts.max_samples_per_row,
        tasks=facts.model.tasks,
        adapters=adapters,
    )
