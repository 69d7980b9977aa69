"""The input of one step in arrays of the host, gathered from the rows, which are its only source. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych_services.worker.adapters.slots import NO_ADAPTER
from triptych_services.worker.runner.block_tables import BlockTable
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.sampling.params import SamplingArrays

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepSizes:
    """The lengths that a step fills in the buffers, as the host knows them."""

    num_tokens: int
    num_rows: int
    num_sampling: int
    """Positions that sample."""
    query_lens: I64
    """[num_rows] guesses included."""
    seq_lens: I64
    """[num_rows]"""
    max_seq_len: int
    """The largest of `seq_lens`; 1 without rows."""

    def max_blocks(self, block_size: int) -> int:
        """Return the columns of a block table that hold the longest row."""
        return -(-self.max_seq_len // block_size)

    @staticmethod
    def of_nothing() -> StepSizes:
        """Return the sizes of a step without rows, to be padded."""
        none = np.zeros(0, np.int64)
        return StepSizes(
            num_tokens=0, num_rows=0, num_sampling=0, query_lens=none, seq_lens=none, max_seq_len=1
        )


class GroupInputs:
    """The places of the keys and values of one group."""

    def __init__(self, table: BlockTable, *, max_num_batched_tokens: int, max_rows: int) -> None:
        self.block_size = table.block_size
        """Tokens per block."""
        self.slot_mapping: I64 = np.zeros(max_num_batched_tokens, np.int64)
        self.block_tables: I32 = np.zeros((max_rows, table.ids.shape[1]), np.int32)


class StateInputs:
    """The pages of states, as in `StateBatch`, and the rows' guesses, as in `GuessedTokens`."""

    def __init__(self, table: BlockTable) -> None:
        self.read_pages: I32 = np.zeros(len(table.ids), np.int32)
        self.write_pages: I32 = np.zeros(len(table.ids), np.int32)
        self.slots: I32 = np.zeros(len(table.ids), np.int32)
        self.replayed: I32 = np.zeros(len(table.ids), np.int32)
        self.guessed: I32 = np.zeros(len(table.ids), np.int32)

    def gather(self, rows: RequestRows, step: StepRows, ends: I64) -> None:
        """Fill in the page before each row's first token, and that of its last one: guesses are in the same."""
        table = rows.tables[-1]
        interval, slots, starts = table.block_size, step.slots, step.starts
        num_rows = slots.size
        read_pages = np.where(starts > 0, table.ids[slots, np.maximum(starts - 1, 0) // interval], 0)
        if step.state_reads is not None:
            read_pages = np.where(step.state_reads > 0, step.state_reads, read_pages)
        self.read_pages[:num_rows] = read_pages
        self.write_pages[:num_rows] = table.ids[slots, (ends - 1) // interval]
        self.slots[:num_rows] = slots
        self.replayed[:num_rows] = rows.num_replayed[slots]
        self.guessed[:num_rows] = 0 if step.places is None else step.computed_lens - step.query_lens

    def pad(self, used: int, num_rows: int) -> None:
        """Give rows that pad a step no page: they neither read nor write one."""
        self.read_pages[used:num_rows] = 0
        self.write_pages[used:num_rows] = 0
        self.replayed[used:num_rows] = 0
        self.guessed[used:num_rows] = 0


class StepInputs:
    """The inputs of the current step, allocated once, as long as the longest step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tables: Sequence[BlockTable],
        max_sampling: int | None = None,
        splits_guesses: bool = False,
    ) -> None:
        """
        Args:
            tables: The rows' block tables by group.
            max_sampling: Positions that sample in a step, at most; None: one for each row.
            splits_guesses: Whether each guess is a row of its own with one query, which has the blocks of its row.
        """
        max_sampling = max_sampling or max_num_seqs
        self._splits_guesses = splits_guesses
        max_rows = max_sampling if splits_guesses else max_num_seqs
        self.token_ids: I64 = np.zeros(max_num_batched_tokens, np.int64)
        self.positions: I64 = np.zeros(max_num_batched_tokens, np.int64)
        self.groups = [
            GroupInputs(table, max_num_batched_tokens=max_num_batched_tokens, max_rows=max_rows)
            for table in tables
            if not table.is_state
        ]
        """By group of keys and values."""
        self.state = next((StateInputs(table) for table in tables if table.is_state), None)
        """Pages of the group of states; None: there is none."""
        self.query_starts: I32 = np.zeros(max_rows + 1, np.int32)
        self.seq_lens: I32 = np.zeros(max_rows, np.int32)
        self.sampling_tokens: I64 = np.zeros(max_sampling, np.int64)
        self.adapter_slots: I32 = np.full(max_num_batched_tokens, NO_ADAPTER, np.int32)
        """[max_num_batched_tokens] slot of each token's adapter; filled if the worker serves some."""
        self.sampling_adapters: I32 = np.full(max_sampling, NO_ADAPTER, np.int32)
        """[max_sampling] the same of the tokens in `sampling_tokens`."""
        self.sampling = SamplingArrays(max_sampling)

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Name of each array -> itself."""
        parts: list[tuple[str, object]] = [("", self)]
        parts += [(f"group{number}." if number else "", group) for number, group in enumerate(self.groups)]
        if self.state is not None:
            parts.append(("state.", self.state))
        named = {
            f"{prefix}{name}": array
            for prefix, part in parts
            for name, array in vars(part).items()
            if isinstance(array, np.ndarray)
        }
        return {**named, **{f"sampling.{name}": array for name, array in self.sampling.columns.items()}}

    def gather(self, rows: RequestRows, step: StepRows) -> StepSizes:
        """Fill in a step with at least one row; a loop-free pass over columns.

        The only reader of token ids.
        """
        slots, query_lens, starts, samples = step.slots, step.computed_lens, step.starts, step.samples
        is_split = self._splits_guesses and step.places is not None
        if is_split:
            slots, query_lens, starts, samples = step.split()
        num_rows = slots.size
        seq_lens = starts + query_lens  # [num_rows] = length of keys and values
        query_starts = self.query_starts[: num_rows + 1]
        np.cumsum(query_lens, out=query_starts[1:])
        num_tokens, max_seq_len = int(query_starts[-1]), int(seq_lens.max())
        positions = self.positions[:num_tokens]
        if num_tokens == num_rows:  # one token each
            slot_of_token, positions[:] = slots, starts
        else:
            row_of_token = np.repeat(np.arange(num_rows), query_lens)  # [num_tokens]
            positions[:] = np.arange(num_tokens) + (starts - query_starts[:-1])[row_of_token]
            slot_of_token = slots[row_of_token]
        self.token_ids[:num_tokens] = rows.token_ids[slot_of_token, positions]
        is_shared = positions < rows.write_start[slot_of_token]
        for table, group in zip(rows.tables, self.groups, strict=False):  # groups of states come last
            block_size = table.block_size
            blocks, offsets = np.divmod(positions, block_size)
            slot_mapping = group.slot_mapping[:num_tokens]
            slot_mapping[:] = table.ids[slot_of_token, blocks]
            slot_mapping *= block_size
            slot_mapping += offsets
            slot_mapping[is_shared] = -1
            max_blocks = -(-max_seq_len // block_size)
            group.block_tables[:num_rows, :max_blocks] = table.ids[slots, :max_blocks]
        if self.state is not None:
            self.state.gather(rows, step, seq_lens)
        self.seq_lens[:num_rows] = seq_lens
        sampling_slots, sampling_tokens = slots[samples], query_starts[1:][samples] - 1
        before: I64 | None = None
        if (places := step.places) is not None:
            before = places.offsets
            if not is_split:
                sampling_slots = sampling_slots[places.rows]
                sampling_tokens = (sampling_tokens - places.counts)[places.rows] + before
        num_sampling = sampling_slots.size
        self.sampling_tokens[:num_sampling] = sampling_tokens
        if rows.adapters is not None:
            self.adapter_slots[:num_tokens] = rows.adapter_slots[slot_of_token]
            self.sampling_adapters[:num_sampling] = rows.adapter_slots[sampling_slots]
        self.sampling.gather(rows.sampling, rows.history, sampling_slots, before)
        return StepSizes(num_tokens, num_rows, num_sampling, query_lens, seq_lens, max_seq_len)
