"""Decode steps as CUDA graphs: one launch instead of hundreds, in buckets of batch sizes.

    rows of a step    1  2  3  5  9   17 …
    bucket            1  2  4  8  16  24 …    the other rows are padding, which reads the null block

A bucket is first run operation by operation, which compiles its kernels, and then recorded. `worker.graph_capture` says
when: at start, with padding only and the largest bucket first, since smaller ones then fit into its memory; or after
the first step that needs it. All graphs share one pool of memory: the outputs of a step are read, or copied out, before
the next step is launched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.cuda.forward import DeviceForward
from triptych_services.worker.runner.cuda.graph_recorder import GraphRecorder, Replay, record_if_it_fits
from triptych_services.worker.runner.cuda.inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from triptych_services.worker.runner.graph_sizes import decode_buckets
from triptych_services.worker.runner.step_inputs import StepSizes


class DecodeGraphPath:
    """A `StepPath` for steps of rows that all compute one token and sample, guesses included: each is such a row."""

    description = "triton graphs"

    def __init__(
        self,
        forward: DeviceForward,
        inputs: DeviceInputs,
        *,
        recorder: GraphRecorder,
        max_seq_len: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            max_seq_len: Length of the longest row of any step.
        """
        self._forward = forward
        self._inputs = inputs
        self._host = inputs.host
        self._recorder = recorder
        self._max_seq_len = max_seq_len
        self._sizes = decode_buckets(inputs.max_num_rows)
        self._buckets: dict[int, _Bucket] = {}
        largest, device = _decodes(inputs.max_num_rows), inputs.device
        self._columns = torch.zeros(inputs.columns_bytes(largest), dtype=torch.uint8, device=device)
        self._tables = [
            torch.zeros(inputs.max_num_rows, width, dtype=torch.int32, device=device)
            for width in inputs.table_widths
        ]
        # Outputs are outside the pool, or each bucket would keep logits of its own there: 2 GiB for 256 x 128k and
        # smaller. Copying them moves 0.26 GB.
        self._logits = torch.zeros(inputs.max_num_rows, vocab_size, device=device)
        self._token_ids = torch.zeros(inputs.max_num_rows, dtype=torch.int64, device=device)

    def serves(self, sizes: StepSizes) -> bool:
        return sizes.num_rows == sizes.num_tokens == sizes.num_sampling

    def forward(self, sizes: StepSizes) -> StepOutput:
        num_rows = sizes.num_rows
        bucket = self._run(sizes, self._sizes[bisect_left(self._sizes, num_rows)])
        slots = bucket.batch.sampling_slots[:num_rows]
        return StepOutput(self._logits[:num_rows], self._token_ids[:num_rows], slots)

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return [partial(self._capture, size) for size in reversed(self._sizes)]

    def _capture(self, size: int) -> None:
        self._run(StepSizes.of_nothing(), size)

    def _run(self, sizes: StepSizes, size: int) -> _Bucket:
        """Compute a gathered decode, padded to `size` rows, and record the bucket if it is not recorded yet."""
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(size, self._static_batch(size))
        self._host.pad_rows(sizes, size)
        columns, tables = self._inputs.upload(_decodes(size), sizes.max_seq_len)
        self._columns[: columns.numel()].copy_(columns)
        for static, table in zip(self._tables, tables, strict=True):
            static[:size, : table.shape[1]].copy_(table)
        if bucket.replay is not None:
            bucket.replay()
        else:
            self._launch(bucket)
            if bucket.may_record:
                self._record(bucket)
        return bucket

    def _static_batch(self, size: int) -> DeviceBatch:
        """Return the place of the inputs of every step of `size` rows."""
        columns = self._columns[: self._inputs.columns_bytes(_decodes(size))]
        lengths = StepLengths((1,) * size, (self._max_seq_len,) * size)
        tables = [table[:size] for table in self._tables]
        return self._inputs.batch(columns, tables, _decodes(size), lengths)

    def _launch(self, bucket: _Bucket) -> None:
        output = self._forward(bucket.batch)
        self._logits[: bucket.size].copy_(output.logits)
        self._token_ids[: bucket.size].copy_(output.token_ids)

    def _record(self, bucket: _Bucket) -> None:
        replays = record_if_it_fits(
            self._recorder, lambda _: self._launch(bucket), what=f"decodes of {bucket.size} rows"
        )
        if replays is None:
            bucket.may_record = False
        else:
            (bucket.replay,) = replays


@dataclass(slots=True, eq=False)
class _Bucket:
    """The graph of one batch size."""

    size: int
    batch: DeviceBatch
    """Inputs, which are views of the path's own memory."""
    replay: Replay | None = None
    may_record: bool = True
    """Whether a graph may be recorded; False if there was no memory for it."""


def _decodes(num_rows: int) -> StepShape:
    """Return the shape of a step of which each row computes one token and samples."""
    return StepShape(num_rows, num_rows, num_rows)
