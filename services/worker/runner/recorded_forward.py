"""The forward pass as a recorded program of native kernels: a step is one call, without Python in its middle."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.worker.attention.base import AttentionBatch
from services.worker.models.base import CausalLM
from services.worker.runner.input_batch import InputBatch, InputBuffers
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program, Recording, record
from triptych_kernels.ops import gather_rows


class RecordedBackend:
    """Records the model at construction. Logits stay as they are until the next forward."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[Tensor], inputs: InputBuffers) -> None:
        """Record `model` for steps of any size that fits `inputs`, whose batches alone may then be computed.

        Raises:
            NotRecordable: the model computes something that no native kernel does; names it.
        """
        self._program = _record(model, kv_caches, inputs)
        self.description = f"{isa()} recorded"

    def forward(self, batch: InputBatch) -> Tensor:
        self._program.run(
            {
                "tokens": len(batch.token_ids),
                "rows": len(batch.attention.seq_lens),
                "samples": batch.num_sampling,
            }
        )
        return self._program.output[: batch.num_sampling]


def _record(model: CausalLM, kv_caches: Sequence[Tensor], inputs: InputBuffers) -> Program:
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
