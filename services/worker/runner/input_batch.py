"""The input of one step, gathered from the rows, which are its only source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych_kernels.state_batch import GuessedTokens, StateBatch
from triptych_services.worker.adapters.slots import NO_ADAPTER
from triptych_services.worker.attention.base import AttentionBackend, AttentionBatch
from triptych_services.worker.runner.block_tables import BlockTable
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import GroupInputs, StateInputs, StepInputs, StepSizes
from triptych_services.worker.sampling.batch import SamplingBatch, SamplingBuffers

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """The inputs of a forward pass; tensors on the rank's device."""

    token_ids: Tensor
    """[num_tokens] int64; the tokens of a row are contiguous, rows in ascending slot order."""
    positions: Tensor
    """[num_tokens] int64, index of each token in its sequence."""
    attention: tuple[AttentionBatch, ...]
    """By group of keys and values."""
    sampling_tokens: Tensor
    """[num_sampling] int64, the tokens that sample: the hidden states that become logits."""
    sampling: SamplingBatch
    state: StateBatch | None = None
    """Pages of the rows' states. None: the model has no states."""
    adapter_slots: Tensor | None = None
    """[num_tokens] int32, -1 for none. None: the worker serves no adapters."""
    sampling_adapters: Tensor | None = None
    """[num_sampling] int32, the same of the tokens in `sampling_tokens`."""


class FeedbackBuffers:
    """The tokens that the device takes from earlier steps, and the slots in which it keeps new ones.

    The buffers are in the host's memory.

    A token that the host does not know yet is the last known one of its row, so it is the only one that the row
    computes.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_sampling: int) -> None:
        """
        Args:
            max_sampling: Positions that sample in a step, at most.
        """
        self._no_slot = max_num_seqs
        self.is_awaited = torch.zeros(max_num_batched_tokens, dtype=torch.bool)
        """[max_num_batched_tokens] whether the id in `token_ids` is a placeholder."""
        self.token_slots = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        """[max_num_batched_tokens] slot of an awaited token; any slot for another."""
        self.sampling_slots = torch.zeros(max_sampling, dtype=torch.int64)
        """[max_sampling] slot of each position that samples; one behind all others if its token is not kept."""
        self._is_awaited = self.is_awaited.numpy()
        self._token_slots = self.token_slots.numpy()
        self._sampling_slots = self.sampling_slots.numpy()

    def gather(self, rows: RequestRows, step: StepRows, query_starts: NDArray[np.int32]) -> None:
        """Fill in the step; `query_starts`: [num_rows + 1].

        One with guesses follows the tokens of all steps before it, and the host reads its tokens before the next one.
        """
        self._is_awaited[: query_starts[-1]] = False
        if step.places is not None:
            self._sampling_slots[: step.places.rows.size] = self._no_slot
            return
        awaited = rows.awaits_id(step.slots)
        last_tokens = query_starts[1:] - 1
        self._is_awaited[last_tokens] = awaited
        self._token_slots[last_tokens] = step.slots
        sampling_slots = step.sampling_slots
        self._sampling_slots[: sampling_slots.size] = sampling_slots

    def pad_tokens(self, sizes: StepSizes, num_tokens: int) -> None:
        """See `InputBuffers.pad_tokens`."""
        self._is_awaited[sizes.num_tokens : num_tokens] = False

    def pad_rows(self, sizes: StepSizes, num_rows: int) -> None:
        """See `InputBuffers.pad_rows`; what padding samples is kept behind the last slot."""
        self._sampling_slots[sizes.num_sampling : num_rows] = self._no_slot


class GroupBuffers:
    """The memory of `GroupInputs` as tensors."""

    def __init__(self, arrays: GroupInputs) -> None:
        self.block_size = arrays.block_size
        """Tokens per block."""
        self.slot_mapping = torch.from_numpy(arrays.slot_mapping)
        self.block_tables = torch.from_numpy(arrays.block_tables)


class StateBuffers:
    """The memory of `StateInputs` as tensors."""

    def __init__(self, arrays: StateInputs) -> None:
        self.read_pages = torch.from_numpy(arrays.read_pages)
        self.write_pages = torch.from_numpy(arrays.write_pages)
        self.slots = torch.from_numpy(arrays.slots)
        self.replayed = torch.from_numpy(arrays.replayed)
        self.guessed = torch.from_numpy(arrays.guessed)

    def guesses(self, view: Callable[[Tensor], Tensor]) -> GuessedTokens:
        """Return the guesses of a step; `view` makes its input of each column."""
        return GuessedTokens(view(self.slots), view(self.replayed), view(self.guessed))


class InputBuffers:
    """The inputs of the current step in the host's memory, allocated once, as long as the longest step.

    A recorded program reads the buffers in place; an asynchronous device gets a copy.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tables: Sequence[BlockTable],
        attention: AttentionBackend,
        feedback: FeedbackBuffers | None = None,
        has_adapters: bool = False,
        max_sampling: int | None = None,
    ) -> None:
        """
        Args:
            tables, max_sampling: As of `StepInputs`.
            attention: Attention backend of every step.
            has_adapters: Whether the worker serves adapters.
            feedback: Buffers for a device that keeps the tokens it samples; None for a CPU.
        """
        self.attention = attention
        self.feedback = feedback
        self._arrays = arrays = StepInputs(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tables=tables,
            max_sampling=max_sampling,
            splits_guesses=feedback is not None,
        )
        self.token_ids = torch.from_numpy(arrays.token_ids)
        self.positions = torch.from_numpy(arrays.positions)
        self.groups = [GroupBuffers(group) for group in arrays.groups]
        """By group of keys and values."""
        self.state = None if arrays.state is None else StateBuffers(arrays.state)
        """Pages of the group of states; None: there is none."""
        self.query_starts = torch.from_numpy(arrays.query_starts)
        self.seq_lens = torch.from_numpy(arrays.seq_lens)
        self.sampling_tokens = torch.from_numpy(arrays.sampling_tokens)
        self.sampling = SamplingBuffers(arrays.sampling)
        self.adapter_slots = torch.from_numpy(arrays.adapter_slots) if has_adapters else None
        self.sampling_adapters = torch.from_numpy(arrays.sampling_adapters) if has_adapters else None
        # the same memory without the overhead of tensors
        self._token_ids = arrays.token_ids
        self._positions = arrays.positions
        self._query_starts = arrays.query_starts
        self._seq_lens = arrays.seq_lens
        self._sampling_tokens = arrays.sampling_tokens

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the name of each array of `StepInputs` -> its memory."""
        return {name: torch.from_numpy(array) for name, array in self._arrays.arrays.items()}

    def gather(self, rows: RequestRows, step: StepRows) -> StepSizes:
        """Fill in a step with at least one row. The device replaces those ids that `feedback` marks as awaited."""
        sizes = self._arrays.gather(rows, step)
        if self.feedback is not None:
            self.feedback.gather(rows, step, self._query_starts[: sizes.num_rows + 1])
        return sizes

    def pad_tokens(self, sizes: StepSizes, num_tokens: int) -> None:
        """Append to a gathered step tokens of no row, up to `num_tokens`, which are not written to the cache."""
        used = sizes.num_tokens
        self._token_ids[used:num_tokens] = 0
        self._positions[used:num_tokens] = 0
        for group in self._arrays.groups:
            group.slot_mapping[used:num_tokens] = -1
        self._arrays.adapter_slots[used:num_tokens] = NO_ADAPTER
        if self.feedback is not None:
            self.feedback.pad_tokens(sizes, num_tokens)

    def pad_rows(self, sizes: StepSizes, num_rows: int) -> None:
        """Append to a gathered step, in which each row computes one token and samples, rows of padding, up
        to `num_rows`: each reads one key of the null block, writes none, and samples greedily.
        """
        used = sizes.num_rows
        self.pad_tokens(sizes, num_rows)
        for group in self._arrays.groups:
            group.block_tables[used:num_rows, : sizes.max_blocks(group.block_size)] = 0
        if self._arrays.state is not None:
            self._arrays.state.pad(used, num_rows)
        self._query_starts[used : num_rows + 1] = np.arange(used, num_rows + 1)
        self._seq_lens[used:num_rows] = 1
        self._sampling_tokens[used:num_rows] = np.arange(used, num_rows)
        self._arrays.sampling_adapters[used:num_rows] = NO_ADAPTER
        self._arrays.sampling.pad(used, num_rows)
        if self.feedback is not None:
            self.feedback.pad_rows(sizes, num_rows)

    def batch(self, sizes: StepSizes, device: torch.device) -> InputBatch:
        """Return the step on a device; on a CPU these are views, valid until the next `gather`."""
        num_tokens = sizes.num_tokens
        return InputBatch(
            token_ids=self.token_ids[:num_tokens].to(device),
            positions=self.positions[:num_tokens].to(device),
            attention=self._attention_batches(sizes, device),
            sampling_tokens=self.sampling_tokens[: sizes.num_sampling].to(device),
            sampling=self.sampling.batch(sizes.num_sampling, device),
            state=None if self.state is None else self._state_batch(self.state, sizes, device),
            adapter_slots=None if self.adapter_slots is None else self.adapter_slots[:num_tokens].to(device),
            sampling_adapters=None
            if self.sampling_adapters is None
            else self.sampling_adapters[: sizes.num_sampling].to(device),
        )

    def _attention_batches(self, sizes: StepSizes, device: torch.device) -> tuple[AttentionBatch, ...]:
        """Return the layout of the step for each group, which differs in the blocks only."""
        num_rows = sizes.num_rows
        query_starts = self.query_starts[: num_rows + 1].to(device)
        seq_lens = self.seq_lens[:num_rows].to(device)
        max_query_len = int(sizes.query_lens.max())
        lists = tuple(sizes.query_lens.tolist()), tuple(sizes.seq_lens.tolist())
        return tuple(
            AttentionBatch(
                group.slot_mapping[: sizes.num_tokens].to(device),
                group.block_tables[:num_rows, : sizes.max_blocks(group.block_size)].to(device),
                query_starts,
                seq_lens,
                self.attention,
                max_query_len,
                sizes.max_seq_len,
                *lists,
            )
            for group in self.groups
        )

    def _state_batch(self, state: StateBuffers, sizes: StepSizes, device: torch.device) -> StateBatch:
        """Return the pages of the step's rows."""
        num_rows = sizes.num_rows
        return StateBatch(
            state.read_pages[:num_rows].to(device),
            state.write_pages[:num_rows].to(device),
            self.query_starts[: num_rows + 1].to(device),
            tuple(sizes.query_lens.tolist()),
        )
