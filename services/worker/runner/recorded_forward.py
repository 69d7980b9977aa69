"""The forward pass as a recorded program of native kernels: a step is one call, without Python in its middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.attention.base import AttentionBatch
from services.worker.models.base import CausalLM
from services.worker.runner.input_batch import InputBatch
from triptych.types.facts import WorkerFacts
from triptych_kernels.cpu.program import Program, Recording, record
from triptych_kernels.ops import gather_rows


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Where the program reads a step; as long as the longest step, its beginning filled before each run."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    sampling_tokens: Tensor

    @classmethod
    def allocate(cls, facts: WorkerFacts) -> _Inputs:
        num_tokens, num_rows = facts.max_num_batched_tokens, facts.max_num_seqs
        blocks_per_row = -(-facts.model.max_model_len // facts.kv.block_size)
        return cls(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            block_tables=torch.zeros(num_rows, blocks_per_row, dtype=torch.int32),
            query_starts=torch.zeros(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32),
            sampling_tokens=torch.zeros(num_rows, dtype=torch.int64),
        )

    def fill(self, batch: InputBatch) -> None:
        attention = batch.attention
        for memory, values in (
            (self.token_ids, batch.token_ids),
            (self.positions, batch.positions),
            (self.slot_mapping, attention.slot_mapping),
            (self.query_starts, attention.query_starts),
            (self.seq_lens, attention.seq_lens),
            (self.sampling_tokens, batch.sampling_tokens),
        ):
            memory[: len(values)] = values
        num_rows, num_blocks = attention.block_tables.shape
        self.block_tables[:num_rows, :num_blocks] = attention.block_tables


class RecordedBackend:
    """Records the model at construction. Logits stay as they are until the next forward."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[Tensor], facts: WorkerFacts) -> None:
        """Record `model` for steps of any size that `facts` allows.

        Raises:
            NotRecordable: the model computes something that no native kernel does; names it.
        """
        self._inputs = _Inputs.allocate(facts)
        self._program = self._record(model, kv_caches)

    @property
    def num_kernel_calls(self) -> int:
        return len(self._program)

    def forward(self, batch: InputBatch) -> Tensor:
        self._inputs.fill(batch)
        self._program.run(
            {
                "tokens": len(batch.token_ids),
                "rows": len(batch.attention.seq_lens),
                "samples": batch.num_sampling,
            }
        )
        return self._program.output[: batch.num_sampling]

    def _record(self, model: CausalLM, kv_caches: Sequence[Tensor]) -> Program:
        inputs = self._inputs

        def forward(recording: Recording) -> Tensor:
            attention = AttentionBatch(
                slot_mapping=recording.input(inputs.slot_mapping, count="tokens"),
                block_tables=recording.input(inputs.block_tables, count="rows"),
                query_starts=recording.input(inputs.query_starts, count="rows"),
                seq_lens=recording.input(inputs.seq_lens, count="rows"),
            )
            hidden = model(
                recording.input(inputs.token_ids, count="tokens"),
                recording.input(inputs.positions, count="tokens"),
                kv_caches,
                attention,
            )
            sampling_tokens = recording.input(inputs.sampling_tokens, count="samples")
            return model.compute_logits(gather_rows(hidden, sampling_tokens))

        return record(forward)
