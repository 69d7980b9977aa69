"""Steps with prompts as CUDA graphs of the operations between attention, in buckets of token counts.

    replay [embed … write keys] | attend | replay [project … write keys] | attend | … | replay [project … norm] | sample

A graph repeats launches of fixed shapes. With padded tokens all operations of a step have fixed shapes but attention,
with a grid that depends on the rows, and sampling: these two are launched as they are. In a small model such a step is
bounded by the host's time to launch, not by the device. Buckets are recorded at the same time as those of decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.attention.base import AttentionBackend, AttentionBatch, KvCache
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.cuda.forward import DeviceForward
from triptych_services.worker.runner.cuda.graph_recorder import Cut, GraphRecorder, Replay, record_if_it_fits
from triptych_services.worker.runner.cuda.inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from triptych_services.worker.runner.graph_sizes import token_buckets
from triptych_services.worker.runner.step_inputs import StepSizes


class PiecewiseGraphPath:
    """A `StepPath` for steps of up to `max_graph_tokens` tokens."""

    description = "triton piecewise graphs"

    def __init__(
        self,
        forward: DeviceForward,
        inputs: DeviceInputs,
        *,
        recorder: GraphRecorder,
        max_graph_tokens: int,
    ) -> None:
        """
        Args:
            max_graph_tokens: Number of tokens of the longest step that is recorded; see `graph_token_limit`.
        """
        self._forward = forward
        self._inputs = inputs
        self._host = inputs.host
        self._recorder = recorder
        self._sizes = token_buckets(min(inputs.max_num_tokens, max_graph_tokens))
        self._buckets: dict[int, _Bucket] = {}
        self._columns = torch.zeros(
            inputs.columns_bytes(_of_tokens(self._sizes[-1])), dtype=torch.uint8, device=inputs.device
        )
        self._attention = _AttentionBetweenGraphs(inputs.host.attention, self._sizes[-1])
        self._hidden: Tensor | None = None
        """[longest, hidden_size], the output of every bucket; outside the pool, or each would keep its own there."""

    def serves(self, sizes: StepSizes) -> bool:
        if sizes.num_tokens > self._sizes[-1]:
            return False
        bucket = self._buckets.get(self._bucket_size(sizes))
        return bucket is None or bool(bucket.pieces)  # without pieces, there was no memory to record it

    def forward(self, sizes: StepSizes) -> StepOutput:
        size = self._bucket_size(sizes)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(size, self._static_batch(size))
        self._host.pad_tokens(sizes, size)
        shape = StepShape(size, sizes.num_rows, sizes.num_sampling)
        lengths = StepLengths(tuple(sizes.query_lens.tolist()), tuple(sizes.seq_lens.tolist()))
        batch = self._upload(shape, sizes.max_seq_len, lengths)
        self._attention.begin(batch.inputs.attention, sizes.num_tokens)
        if bucket.pieces:
            self._replay(bucket)
            return self._forward.sample(self._hidden_of(size), batch)
        output = self._forward.sample(self._launch(bucket), batch)
        self._record(bucket)
        return output

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return [partial(self._capture, size) for size in reversed(self._sizes)]

    def _bucket_size(self, sizes: StepSizes) -> int:
        return self._sizes[bisect_left(self._sizes, sizes.num_tokens)]

    def _capture(self, size: int) -> None:
        """Record the bucket of `size` tokens after a step that consists of padding."""
        bucket = self._buckets[size] = _Bucket(size, self._static_batch(size))
        self._host.pad_tokens(StepSizes.of_nothing(), size)
        batch = self._upload(_of_tokens(size), 1, StepLengths((size,), (size,)))
        self._attention.begin(batch.inputs.attention, 0)
        self._launch(bucket)
        self._record(bucket)

    def _upload(self, shape: StepShape, max_seq_len: int, lengths: StepLengths) -> DeviceBatch:
        """Copy the gathered step to the device, and its tokens to their static place."""
        columns, tables = self._inputs.upload(shape, max_seq_len)
        num_bytes = self._inputs.token_bytes(shape.num_tokens)
        self._columns[:num_bytes].copy_(columns[:num_bytes])
        return self._inputs.batch(columns, tables, shape, lengths)

    def _static_batch(self, size: int) -> DeviceBatch:
        """Return a batch with the static place of a step's tokens. Its rows are not used."""
        shape = _of_tokens(size)
        columns = self._columns[: self._inputs.columns_bytes(shape)]
        table = torch.zeros(1, 1, dtype=torch.int32, device=columns.device)
        tables = [table] * len(self._inputs.table_widths)
        batch = self._inputs.batch(columns, tables, shape, StepLengths((size,), (size,)))
        attention = tuple(replace(group, backend=self._attention) for group in batch.inputs.attention)
        return replace(batch, inputs=replace(batch.inputs, attention=attention))

    def _launch(self, bucket: _Bucket) -> Tensor:
        """Launch the layers. Return the hidden states [size, hidden_size], at their static place."""
        hidden = self._forward.hidden(bucket.batch)
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._sizes[-1], hidden.shape[1])
        return self._hidden_of(bucket.size).copy_(hidden)

    def _hidden_of(self, size: int) -> Tensor:
        assert self._hidden is not None, "the first step is never replayed"
        return self._hidden[:size]

    def _replay(self, bucket: _Bucket) -> None:
        first, *rest = bucket.pieces
        first()
        for call, piece in zip(bucket.calls, rest, strict=True):
            self._attention.run(call)
            piece()

    def _record(self, bucket: _Bucket) -> None:
        def launch(cut: Cut) -> None:
            bucket.calls.clear()  # a recording may be tried twice
            with self._attention.recording(cut, bucket.calls):
                self._launch(bucket)

        pieces = record_if_it_fits(self._recorder, launch, what=f"steps of {bucket.size} tokens")
        if pieces is not None:
            bucket.pieces = pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The attention of one layer."""

    kv_cache: KvCache
    options: AttendOptions


class _AttentionBetweenGraphs:
    """The `AttentionBackend` of recorded layers, which attends between two recordings by the rows of the actual step.

    Queries and results of all layers pass through the same memory, which no recording owns.
    """

    in_graphs = True

    def __init__(self, attention: AttentionBackend, max_num_tokens: int) -> None:
        self.name = attention.name
        self.writer = attention.writer
        self.supported = attention.supported
        self._attention = attention
        self._max_num_tokens = max_num_tokens
        self._batches: tuple[AttentionBatch, ...] = ()
        self._num_tokens = 0
        self._memory: tuple[Tensor, Tensor] | None = None
        self._cut: Cut | None = None
        self._calls: list[_Call] = []

    def begin(self, batches: tuple[AttentionBatch, ...], num_tokens: int) -> None:
        """Set the step to attend for.

        Args:
            batches: Its layout by group of keys and values.
            num_tokens: Number of tokens without padding; 0: no attention is computed.
        """
        self._batches, self._num_tokens = batches, num_tokens

    @contextmanager
    def recording(self, cut: Cut, calls: list[_Call]) -> Iterator[None]:
        """Until the body ends, cut the recording in place of attending, and append the call to `calls`."""
        self._cut, self._calls = cut, calls
        try:
            yield
        finally:
            self._cut = None

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        if self._memory is None:
            sizes = self._max_num_tokens, *query.shape[1:]
            value_dim = options.latent_dim or query.shape[2]
            # padding is computed on and discarded, so it must not be NaN
            self._memory = query.new_zeros(sizes), query.new_zeros((*sizes[:2], value_dim))
        queries, attended = (memory[: len(query)] for memory in self._memory)
        queries.copy_(query)
        call = _Call(kv_cache, options)
        if self._cut is None:
            self.run(call)
        else:
            self._cut()
            self._calls.append(call)
        return attended

    def run(self, call: _Call) -> None:
        """Attend for one layer of the step that `begin` set."""
        assert self._memory is not None, "the first step is never replayed"
        assert self._batches, "a step begins before it attends"
        if not self._num_tokens:
            return
        queries, attended = (memory[: self._num_tokens] for memory in self._memory)
        batch = self._batches[call.kv_cache.group]
        attended.copy_(self._attention.attend(queries, call.kv_cache, batch, call.options))


@dataclass(slots=True, eq=False)
class _Bucket:
    """The graphs of one token count."""

    size: int
    batch: DeviceBatch
    """Inputs, which are views of the path's own memory."""
    pieces: tuple[Replay, ...] = ()
    """Empty before recording, or if there was no memory for it."""
    calls: list[_Call] = field(default_factory=list)
    """The calls between the pieces, one fewer than these."""


def _of_tokens(num_tokens: int) -> StepShape:
    return StepShape(num_tokens, 1, 1)
