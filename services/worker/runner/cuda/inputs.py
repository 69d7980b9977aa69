"""A step's inputs on an asynchronous device: one block of memory, packed on the host and copied at once.

    token_ids | positions | is_awaited | … | slot_mapping of each group | … | sampling positions | block_tables of each

Columns are as long as the step, so a decode of few rows sends little. The places of all columns follow from the step's
shape, except for the block tables, which are as wide as the longest row and come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBatch
from triptych_services.worker.runner.cuda.streams import DeviceStream
from triptych_services.worker.runner.input_batch import InputBatch, InputBuffers
from triptych_services.worker.sampling.batch import SamplingBatch
from triptych_services.worker.sampling.params import COLUMN_TO_DTYPE

_ALIGNMENT = (
    256  # bytes; the allocator's own, so that kernels compiled for aligned pointers serve every column
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The lengths of a step's columns."""

    num_tokens: int
    num_rows: int
    num_sampling: int


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The lengths of each row, as the host knows them; see `AttentionBatch`."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """An `InputBatch`, in which some token ids are known to the device only; see `LastTokens`."""

    inputs: InputBatch
    is_awaited: Tensor
    """[num_tokens] bool."""
    token_slots: Tensor
    """[num_tokens] int64."""
    sampling_slots: Tensor
    """[num_sampling] int64."""


class _Length(Enum):
    TOKENS = auto()
    ROWS = auto()
    ROW_BOUNDS = auto()
    """One more than rows."""
    SAMPLES = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a column in a block, in bytes."""

    start: int
    end: int


class DeviceInputs:
    """Copies steps from the host's `InputBuffers` to the device."""

    def __init__(self, inputs: InputBuffers, stream: DeviceStream) -> None:
        feedback, sampling = inputs.feedback, inputs.sampling.columns.columns
        assert feedback is not None, "an asynchronous device keeps the tokens it samples"
        self.host = inputs
        self.device = stream.device
        self._stream = stream
        self._attention = inputs.attention
        of_tokens = [] if inputs.adapter_slots is None else [inputs.adapter_slots]
        of_samples = [] if inputs.sampling_adapters is None else [inputs.sampling_adapters]
        self._has_adapters, self._has_states = bool(of_tokens), inputs.state is not None
        of_states = [] if inputs.state is None else [inputs.state.read_pages, inputs.state.write_pages]
        columns = (  # in the order of `batch`
            (inputs.token_ids, _Length.TOKENS),
            (inputs.positions, _Length.TOKENS),
            (feedback.is_awaited, _Length.TOKENS),
            (feedback.token_slots, _Length.TOKENS),
            *((group.slot_mapping, _Length.TOKENS) for group in inputs.groups),
            *((column, _Length.TOKENS) for column in of_tokens),
            (inputs.query_starts, _Length.ROW_BOUNDS),
            (inputs.seq_lens, _Length.ROWS),
            *((pages, _Length.ROWS) for pages in of_states),
            (inputs.sampling_tokens, _Length.SAMPLES),
            (feedback.sampling_slots, _Length.SAMPLES),
            *((column, _Length.SAMPLES) for column in of_samples),
            *((column, _Length.SAMPLES) for column in sampling.values()),
        )
        self._dtypes = tuple(tensor.dtype for tensor, _ in columns)
        self._kinds = tuple((length, tensor.itemsize) for tensor, length in columns)
        self._sources = tuple(tensor.view(torch.uint8).numpy() for tensor, _ in columns)
        self._tables: list[NDArray[np.int32]] = [group.block_tables.numpy() for group in inputs.groups]
        self._block_sizes = [group.block_size for group in inputs.groups]
        self.table_widths = [table.shape[1] for table in self._tables]
        """Columns of each group's block table."""
        self.max_num_rows = len(inputs.seq_lens)
        """Rows of a step, at most; a guess is a row of its own."""
        self.max_num_tokens = inputs.token_ids.numel()
        longest = StepShape(self.max_num_tokens, self.max_num_rows, self.max_num_rows)
        stream.reserve(self.columns_bytes(longest) + sum(_align(table.nbytes) for table in self._tables))

    def columns_bytes(self, shape: StepShape) -> int:
        """Return the bytes of a block before its block tables."""
        return _align(_places(self._kinds, shape)[-1].end)

    def token_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the columns of tokens, which come first in a block."""
        places = _places(self._kinds, StepShape(num_tokens, 1, 1))
        return next(
            place.start
            for (length, _), place in zip(self._kinds, places, strict=True)
            if length is not _Length.TOKENS
        )

    def upload(self, shape: StepShape, max_seq_len: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Copy the gathered step to the device. The next step may be gathered at once.

        Args:
            max_seq_len: Length of the longest row.

        Returns:
            The columns, [columns_bytes] uint8, and each group's block tables, [num_rows, max_blocks] int32.
        """
        block = self._stream.host_block()
        for source, place in zip(self._sources, _places(self._kinds, shape), strict=True):
            block[place.start : place.end] = source[: place.end - place.start]
        size = self.columns_bytes(shape)
        num_rows, end, spans = shape.num_rows, size, []
        for table, block_size in zip(self._tables, self._block_sizes, strict=True):
            start, max_blocks = _align(end), -(-max_seq_len // block_size)
            end = start + num_rows * max_blocks * table.itemsize
            block[start:end].view(np.int32).reshape(num_rows, max_blocks)[:] = table[:num_rows, :max_blocks]
            spans.append((start, end, max_blocks))
        uploaded = self._stream.upload(end)
        return uploaded[:size], tuple(
            uploaded[start:end].view(torch.int32).view(num_rows, max_blocks)
            for start, end, max_blocks in spans
        )

    def batch(
        self, columns: Tensor, tables: Sequence[Tensor], shape: StepShape, lengths: StepLengths
    ) -> DeviceBatch:
        """Return views of columns that have the layout of `upload`, wherever they have been copied since."""
        views = [
            columns[place.start : place.end].view(dtype)
            for place, dtype in zip(_places(self._kinds, shape), self._dtypes, strict=True)
        ]
        token_ids, positions, is_awaited, token_slots, *rest = views
        slot_mappings, rest = rest[: len(tables)], rest[len(tables) :]
        adapter_slots = rest.pop(0) if self._has_adapters else None
        query_starts, seq_lens, *rest = rest
        state = None
        if self._has_states:
            read_pages, write_pages, *rest = rest
            state = StateBatch(read_pages, write_pages, query_starts, lengths.query_lens)
        sampling_adapters = rest.pop(2) if self._has_adapters else None
        sampling_tokens, sampling_slots, *sampling = rest
        limits = max(lengths.query_lens), max(lengths.seq_lens)
        attention = tuple(
            AttentionBatch(
                slot_mapping,
                block_tables,
                query_starts,
                seq_lens,
                self._attention,
                *limits,
                lengths.query_lens,
                lengths.seq_lens,
            )
            for slot_mapping, block_tables in zip(slot_mappings, tables, strict=True)
        )
        batch = SamplingBatch(dict(zip(COLUMN_TO_DTYPE, sampling, strict=True)))
        inputs = InputBatch(
            token_ids, positions, attention, sampling_tokens, batch, state, adapter_slots, sampling_adapters
        )
        return DeviceBatch(inputs, is_awaited, token_slots, sampling_slots)


@lru_cache(maxsize=512)  # decodes repeat their shapes, steps with prompts rarely do
def _places(kinds: tuple[tuple[_Length, int], ...], shape: StepShape) -> tuple[_Place, ...]:
    """Return the places of columns of these lengths and bytes per entry."""
    counts = {
        _Length.TOKENS: shape.num_tokens,
        _Length.ROWS: shape.num_rows,
        _Length.ROW_BOUNDS: shape.num_rows + 1,
        _Length.SAMPLES: shape.num_sampling,
    }
    places, end = [], 0
    for length, itemsize in kinds:
        start = _align(end)
        end = start + counts[length] * itemsize
        places.append(_Place(start, end))
    return tuple(places)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
