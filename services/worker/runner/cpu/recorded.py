"""The forward pass as a recorded program of native kernels: a step is one call, without Python in its middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from services.worker.attention.base import AttentionBatch, KvCache
from services.worker.layers.step_context import StepContext
from services.worker.models.base import CausalLM
from services.worker.runner.backend import StepOutput
from services.worker.runner.input_batch import InputBuffers, StepSizes
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program, Recording, record
from triptych_kernels.ops import gather_rows


class RecordedBackend:
    """Records the model at construction."""

    computes_with_torch = False

    def __init__(self, model: CausalLM, kv_caches: Sequence[KvCache], inputs: InputBuffers) -> None:
        """Record `model` for steps of any size that fits `inputs`.

        Raises:
            NotRecordable: the model computes something that no native kernel does; names it.
        """
        self._program = _record(model, kv_caches, inputs)
        self.description = f"{isa()} recorded"

    def forward(self, sizes: StepSizes) -> StepOutput:
        self._program.run({"tokens": sizes.num_tokens, "rows": sizes.num_rows, "samples": sizes.num_sampling})
        logits, token_ids, hidden = self._program.outputs
        return StepOutput(
            logits[: sizes.num_sampling], token_ids[: sizes.num_sampling], hidden=hidden[: sizes.num_tokens]
        )

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()


def _record(model: CausalLM, kv_caches: Sequence[KvCache], inputs: InputBuffers) -> Program:
    def forward(recording: Recording) -> tuple[Tensor, ...]:
        attention = AttentionBatch(
            slot_mapping=recording.input(inputs.slot_mapping, count="tokens"),
            block_tables=recording.input(inputs.block_tables, count="rows"),
            query_starts=recording.input(inputs.query_starts, count="rows"),
            seq_lens=recording.input(inputs.seq_lens, count="rows"),
            backend=inputs.attention,
        )
        hidden = model(
            recording.input(inputs.token_ids, count="tokens"),
            recording.input(inputs.positions, count="tokens"),
            StepContext(attention, kv_caches),
        )
        sampling_tokens = recording.input(inputs.sampling_tokens, count="samples")
        logits = model.compute_logits(gather_rows(hidden, sampling_tokens))
        sampling = inputs.sampling.columns.map(lambda column: recording.input(column, count="samples"))
        return logits, sampling.choose(logits), hidden

    return record(forward)
