"""The plainest way to run a model on the CPU: its operations are called one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.worker.attention.base import KvCache
from services.worker.layers.step_context import StepContext
from services.worker.models.base import CausalLM
from services.worker.runner.backend import StepOutput
from services.worker.runner.input_batch import InputBuffers, StepSizes
from triptych_kernels.cpu.library import isa
from triptych_kernels.ops import gather_rows


class EagerBackend:
    """A `ForwardBackend` that calls the model, operation by operation."""

    computes_with_torch = True

    def __init__(self, model: CausalLM, kv_caches: Sequence[KvCache], inputs: InputBuffers) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._device = kv_caches[0].device
        native = self._device.type == "cpu" and isa()
        self.description = f"{isa()} eager" if native else "torch"

    def forward(self, sizes: StepSizes) -> StepOutput:
        batch = self._inputs.batch(sizes, self._device)
        context = StepContext(batch.attention, self._kv_caches)
        hidden = self._model(batch.token_ids, batch.positions, context)
        # [num_sampling, hidden_size]: logits cost as much as several layers, so only for rows that sample
        logits = self._model.compute_logits(gather_rows(hidden, batch.sampling_tokens))
        return StepOutput(logits, batch.sampling.choose(logits), hidden=hidden)

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()
