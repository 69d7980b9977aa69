"""Decode steps as CUDA graphs: one launch instead of hundreds, by buckets of batch sizes.

    rows of a step    1  2  3  5  9   17 …
    bucket            1  2  4  8  16  24 …    the rows that are missing are padding, which reads the null block

A bucket's first step runs operation by operation, which compiles what is not compiled yet, and is recorded after that;
so nothing is captured before it is needed. All graphs share one pool of memory: what a step leaves in it is read
before the next one is launched, or copied out. Steps with longer rows run operation by operation.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.runner.backend import ForwardBackend, StepOutput
from services.worker.runner.device_forward import DeviceForward
from services.worker.runner.device_inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from services.worker.runner.input_batch import InputBuffers, StepSizes
from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_MIB = 1 << 20

Replay = Callable[[], None]


class GraphRecorder(Protocol):
    """Turns launches into something that launches them again."""

    num_bytes: int
    """Memory that all recordings hold."""

    def record(self, launch: Callable[[], None]) -> Replay:
        """Note what `launch` launches, without running it.

        Raises:
            torch.OutOfMemoryError: there is no memory for what it allocates; nothing was recorded.
            RuntimeError: it does something that cannot be recorded; nothing can be from then on.
        """
        ...


class CudaGraphRecorder:
    """A `GraphRecorder` whose graphs share one pool."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, launch: Callable[[], None]) -> Replay:
        torch.cuda.empty_cache()  # else memory that capturing gives back would be counted against the pool
        reserved = torch.cuda.memory_reserved(self._device)
        graph, compute = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # the event loop's thread makes no CUDA calls, but a library's thread might: they are not ours to forbid
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                launch()
        finally:
            torch.cuda.set_stream(compute)  # which torch leaves to us where capturing fails
        self.num_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return graph.replay


class CudaGraphBackend:
    """A `ForwardBackend`; decodes whose rows all sample are replayed, other steps go to the one without graphs."""

    def __init__(
        self,
        forward: DeviceForward,
        inputs: DeviceInputs,
        *,
        host: InputBuffers,
        eager: ForwardBackend,
        recorder: GraphRecorder,
        device: torch.device,
        max_seq_len: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            inputs: copies what stands in `host`.
            max_seq_len: no row is longer, in any step.
        """
        self.description = "triton graphs"
        self._forward = forward
        self._inputs = inputs
        self._host = host
        self._eager = eager
        self._recorder = recorder
        self._max_seq_len = max_seq_len
        self._sizes = graph_buckets(inputs.max_num_seqs)
        self._buckets: dict[int, _Bucket] = {}
        largest = _decodes(inputs.max_num_seqs)
        self._columns = torch.zeros(inputs.columns_bytes(largest), dtype=torch.uint8, device=device)
        self._tables = torch.zeros(inputs.max_num_seqs, inputs.max_blocks, dtype=torch.int32, device=device)
        # Outputs stand outside the pool, or each bucket would keep logits of its own there: 2 GiB of 256 x 128k and
        # smaller. The copy moves 0.26 GB then.
        self._logits = torch.zeros(inputs.max_num_seqs, vocab_size, device=device)
        self._token_ids = torch.zeros(inputs.max_num_seqs, dtype=torch.int64, device=device)

    def forward(self, sizes: StepSizes) -> StepOutput:
        num_rows = sizes.num_rows
        if not num_rows == sizes.num_tokens == sizes.num_sampling:
            return self._eager.forward(sizes)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(size, self._static_batch(size))
        self._host.pad(sizes, size)
        columns, tables = self._inputs.upload(_decodes(size), sizes.max_blocks)
        self._columns[: columns.numel()].copy_(columns)
        self._tables[:size, : sizes.max_blocks].copy_(tables)
        if bucket.replay is not None:
            bucket.replay()
        else:
            self._launch(bucket)
            if bucket.may_record:
                self._record(bucket)
        slots = bucket.batch.sampling_slots[:num_rows]
        return StepOutput(self._logits[:num_rows], self._token_ids[:num_rows], slots)

    def _static_batch(self, size: int) -> DeviceBatch:
        """Where a step of `size` rows always stands."""
        columns = self._columns[: self._inputs.columns_bytes(_decodes(size))]
        lengths = StepLengths((1,) * size, (self._max_seq_len,) * size)
        return self._inputs.batch(columns, self._tables[:size], _decodes(size), lengths)

    def _launch(self, bucket: _Bucket) -> None:
        output = self._forward(bucket.batch)
        self._logits[: bucket.size].copy_(output.logits)
        self._token_ids[: bucket.size].copy_(output.token_ids)

    def _record(self, bucket: _Bucket) -> None:
        started = time.perf_counter()
        try:
            bucket.replay = self._recorder.record(lambda: self._launch(bucket))
        except torch.OutOfMemoryError as error:
            bucket.may_record = False
            log.warning(
                "no memory for a CUDA graph of %d rows, so such steps stay slower; "
                "lower cache.memory_fraction: %s",
                bucket.size,
                error,
            )
            return
        except RuntimeError as error:
            raise ConfigError(
                f"worker.enforce_eager: the decodes of this model cannot be captured as CUDA graphs ({error}); "
                "set it to true"
            ) from error
        log.info(
            "captured decodes of %d rows in %.0f ms; graphs hold %.0f MiB",
            bucket.size,
            (time.perf_counter() - started) * 1e3,
            self._recorder.num_bytes / _MIB,
        )


@dataclass(slots=True, eq=False)
class _Bucket:
    """One batch size."""

    size: int
    batch: DeviceBatch
    """Static: views of the backend's own memory."""
    replay: Replay | None = None
    may_record: bool = True
    """False: there was no memory for it."""


def graph_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that are recorded, ascending up to `max_num_seqs`: padding is dear for few rows, graphs for many."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def _decodes(num_rows: int) -> StepShape:
    """Of a step whose rows compute one token each and all sample."""
    return StepShape(num_rows, num_rows, num_rows)
