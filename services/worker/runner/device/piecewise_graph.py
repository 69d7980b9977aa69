"""Steps with prompts as CUDA graphs of what lies between their attention, by buckets of token counts.

    replay [embed … write keys] | attend | replay [project … write keys] | attend | … | replay [project … norm] | sample

A graph stands for launches whose shapes never change. With its tokens padded, that holds for all of a step but
attention, whose grid follows from its rows, and sampling: these two are launched as they are. In a small model such a
step is bounded by the host's time to launch, not by the device's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.worker.attention.base import AttentionBackend, AttentionBatch, KvCache
from services.worker.runner.backend import ForwardBackend, StepOutput
from services.worker.runner.device.forward import DeviceForward
from services.worker.runner.device.graph_recorder import Cut, GraphRecorder, Replay, record_if_it_fits
from services.worker.runner.device.inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from services.worker.runner.input_batch import InputBuffers, StepSizes

MAX_GRAPH_TOKENS = 512
"""Longer steps keep the device busy for longer than their launches take the host."""


class PiecewiseGraphBackend:
    """A `ForwardBackend`; steps of more than `MAX_GRAPH_TOKENS` go to another."""

    computes_with_torch = False

    def __init__(
        self,
        forward: DeviceForward,
        inputs: DeviceInputs,
        *,
        host: InputBuffers,
        others: ForwardBackend,
        recorder: GraphRecorder,
        device: torch.device,
    ) -> None:
        """
        Args:
            inputs: copies what stands in `host`.
            others: computes the steps that are too long.
        """
        self.description = "triton piecewise graphs"
        self._forward = forward
        self._inputs = inputs
        self._host = host
        self._others = others
        self._recorder = recorder
        self._sizes = token_buckets(inputs.max_num_tokens)
        self._buckets: dict[int, _Bucket] = {}
        self._columns = torch.zeros(
            inputs.columns_bytes(_of_tokens(self._sizes[-1])), dtype=torch.uint8, device=device
        )
        self._seam = _Seam(host.attention, self._sizes[-1])

    def forward(self, sizes: StepSizes) -> StepOutput:
        if sizes.num_tokens > self._sizes[-1]:
            return self._others.forward(sizes)
        size = self._sizes[bisect_left(self._sizes, sizes.num_tokens)]
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(size, self._static_batch(size))
        elif bucket.hidden is None:
            return self._others.forward(sizes)  # there was no memory to record it
        self._host.pad_tokens(sizes, size)
        shape = StepShape(size, sizes.num_rows, sizes.num_sampling)
        lengths = StepLengths(tuple(sizes.query_lens.tolist()), tuple(sizes.seq_lens.tolist()))
        columns, tables = self._inputs.upload(shape, sizes.max_blocks)
        num_bytes = self._inputs.token_bytes(size)
        self._columns[:num_bytes].copy_(columns[:num_bytes])
        batch = self._inputs.batch(columns, tables, shape, lengths)
        self._seam.begin(batch.inputs.attention, sizes.num_tokens)
        if bucket.hidden is not None:
            self._replay(bucket)
            return self._forward.sample(bucket.hidden, batch)
        output = self._forward.sample(self._forward.hidden(bucket.batch), batch)
        self._record(bucket)
        return output

    def _static_batch(self, size: int) -> DeviceBatch:
        """Where the tokens of a step always stand. Its rows are nobody's: they are not looked at."""
        shape = _of_tokens(size)
        columns = self._columns[: self._inputs.columns_bytes(shape)]
        tables = torch.zeros(1, 1, dtype=torch.int32, device=columns.device)
        batch = self._inputs.batch(columns, tables, shape, StepLengths((size,), (size,)))
        attention = replace(batch.inputs.attention, backend=self._seam)
        return replace(batch, inputs=replace(batch.inputs, attention=attention))

    def _replay(self, bucket: _Bucket) -> None:
        first, *rest = bucket.pieces
        first()
        for call, piece in zip(bucket.calls, rest, strict=True):
            self._seam.run(call)
            piece()

    def _record(self, bucket: _Bucket) -> None:
        def launch(cut: Cut) -> None:
            with self._seam.recording(cut, bucket.calls):
                bucket.hidden = self._forward.hidden(bucket.batch)

        pieces = record_if_it_fits(self._recorder, launch, what=f"steps of {bucket.size} tokens")
        if pieces is None:
            bucket.hidden = None
        else:
            bucket.pieces = pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Attention of one layer."""

    kv_cache: KvCache
    scale: float
    window: int


class _Seam:
    """The `AttentionBackend` that recorded layers see: between two recordings stands what a step really asks.

    Queries and results of all layers pass through the same memory, which no recording owns.
    """

    in_graphs = True

    def __init__(self, attention: AttentionBackend, max_num_tokens: int) -> None:
        self.name = attention.name
        self._attention = attention
        self._max_num_tokens = max_num_tokens
        self._batch: AttentionBatch | None = None
        self._num_tokens = 0
        self._memory: tuple[Tensor, Tensor] | None = None
        self._cut: Cut | None = None
        self._calls: list[_Call] = []

    def begin(self, batch: AttentionBatch, num_tokens: int) -> None:
        """From now on attend for this step, whose first `num_tokens` tokens are no padding."""
        self._batch, self._num_tokens = batch, num_tokens

    @contextmanager
    def recording(self, cut: Cut, calls: list[_Call]) -> Iterator[None]:
        """Meanwhile do not attend: cut, and append what is to be run there."""
        self._cut, self._calls = cut, calls
        try:
            yield
        finally:
            self._cut = None

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, scale: float, window: int = 0
    ) -> Tensor:
        if self._memory is None:
            shape = self._max_num_tokens, *query.shape[1:]
            # what stands behind a step's tokens is computed on, and thrown away: it should be numbers
            self._memory = query.new_zeros(shape), query.new_zeros(shape)
        queries, attended = (memory[: len(query)] for memory in self._memory)
        queries.copy_(query)
        call = _Call(kv_cache, scale, window)
        if self._cut is None:
            self.run(call)
        else:
            self._cut()
            self._calls.append(call)
        return attended

    def run(self, call: _Call) -> None:
        """Attend for one layer of the step that `begin` named."""
        assert self._memory is not None, "the first step of all is not replayed"
        assert self._batch is not None, "a step begins before it attends"
        queries, attended = (memory[: self._num_tokens] for memory in self._memory)
        attended.copy_(self._attention.attend(queries, call.kv_cache, self._batch, call.scale, call.window))


@dataclass(slots=True, eq=False)
class _Bucket:
    """One count of tokens."""

    size: int
    batch: DeviceBatch
    """Static: views of the backend's own memory."""
    pieces: tuple[Replay, ...] = ()
    calls: list[_Call] = field(default_factory=list)
    """One less: what stands between the pieces."""
    hidden: Tensor | None = None
    """[size, hidden_size], what the last piece leaves; None: there was no memory to record it."""


def token_buckets(max_num_tokens: int) -> tuple[int, ...]:
    """Counts of tokens that are recorded, ascending; the last is the most that a step has, or `MAX_GRAPH_TOKENS`.

    Few tokens are bound by the weights' bytes, so padding costs them nothing; of many it should stay small.
    """
    longest = min(max_num_tokens, MAX_GRAPH_TOKENS)
    sizes = {*range(16, 64, 16), *range(64, 256, 32), *range(256, MAX_GRAPH_TOKENS, 64), longest}
    return tuple(sorted(size for size in sizes if size <= longest))


def _of_tokens(num_tokens: int) -> StepShape:
    return StepShape(num_tokens, 1, 1)
