"""A step's inputs on an asynchronous device: one block of memory, packed on the host and copied at once.

    token_ids | positions | slot_mapping | is_awaited | … | sampling positions | block_tables

Columns are as long as the step, so a decode of few rows sends little. The places of all columns follow from the step's
shape, except for the block tables, which are as wide as the longest row and come last.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        self._has_adapters = bool(of_tokens)
        columns = (  # in the order of `batch`
            (inputs.token_ids, _Length.TOKENS),
            (inputs.positions, _Length.TOKENS),
            (inputs.slot_mapping, _Length.TOKENS),
            (feedback.is_awaited, _Length.TOKENS),
            (feedback.token_slots, _Length.TOKENS),
            *((column, _Length.TOKENS) for column in of_tokens),
            (inputs.query_starts, _Length.ROW_BOUNDS),
            (inputs.seq_lens, _Length.ROWS),
            (inputs.sampling_tokens, _Length.SAMPLES),
            (feedback.sampling_slots, _Length.SAMPLES),
            *((column, _Length.SAMPLES) for column in of_samples),
            *((column, _Length.SAMPLES) for column in sampling.values()),
        )
        self._dtypes = tuple(tensor.dtype for tensor, _ in columns)
        self._kinds = tuple((length, tensor.itemsize) for tensor, length in columns)
        self._sources = tuple(tensor.view(torch.uint8).numpy() for tensor, _ in columns)
        self._block_tables: NDArray[np.int32] = inputs.block_tables.numpy()
        self.max_num_seqs, self.max_blocks = self._block_tables.shape
        self.max_num_tokens = inputs.token_ids.numel()
        longest = StepShape(self.max_num_tokens, self.max_num_seqs, self.max_num_seqs)
        stream.reserve(self.columns_bytes(longest) + self._block_tables.nbytes)

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

    def upload(self, shape: StepShape, max_blocks: int) -> tuple[Tensor, Tensor]:
        """Copy the gathered step to the device. The next step may be gathered at once.

        Returns:
            The columns, [columns_bytes] uint8, and the block tables, [num_rows, max_blocks] int32.
        """
        block = self._stream.host_block()
        for source, place in zip(self._sources, _places(self._kinds, shape), strict=True):
            block[place.start : place.end] = source[: place.end - place.start]
        size = self.columns_bytes(shape)
        end = size + shape.num_rows * max_blocks * self._block_tables.itemsize
        tables = block[size:end].view(np.int32).reshape(shape.num_rows, max_blocks)
        tables[:] = self._block_tables[: shape.num_rows, :max_blocks]
        uploaded = self._stream.upload(end)
        return uploaded[:size], uploaded[size:].view(torch.int32).view(shape.num_rows, max_blocks)

    def batch(
        self, columns: Tensor, block_tables: Tensor, shape: StepShape, lengths: StepLengths
    ) -> DeviceBatch:
        """Return views of columns that have the layout of `upload`, wherever they have been copied since."""
        views = [
            columns[place.start : place.end].view(dtype)
            for place, dtype in zip(_places(self._kinds, shape), self._dtypes, strict=True)
        ]
        adapter_slots = views.pop(5) if self._has_adapters else None
        sampling_adapters = views.pop(9) if self._has_adapters else None
        (
            token_ids,
            positions,
            slot_mapping,
            is_awaited,
            token_slots,
            query_starts,
            seq_lens,
            sampling_tokens,
            sampling_slots,
            *sampling,
        ) = views
        attention = AttentionBatch(
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_starts=query_starts,
            seq_lens=seq_lens,
            backend=self._attention,
            max_query_len=max(lengths.query_lens),
            max_seq_len=max(lengths.seq_lens),
            query_lens_list=lengths.query_lens,
            seq_lens_list=lengths.seq_lens,
        )
        batch = SamplingBatch(dict(zip(COLUMN_TO_DTYPE, sampling, strict=True)))
        inputs = InputBatch(
            token_ids, positions, attention, sampling_tokens, batch, adapter_slots, sampling_adapters
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
