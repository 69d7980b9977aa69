"""The model on an asynchronous device: inputs copied there, operations called one by one, last tokens kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from services.worker.attention.base import KvCache
from services.worker.layers.step_context import StepContext
from services.worker.models.base import CausalLM
from services.worker.runner.backend import StepOutput
from services.worker.runner.cuda.inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from services.worker.runner.cuda.last_tokens import LastTokens
from services.worker.runner.input_batch import StepSizes
from triptych_kernels.ops import gather_rows


class DeviceForward:
    """What a step launches, whoever says where its inputs stand."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[KvCache], last_tokens: LastTokens) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._last_tokens = last_tokens

    def __call__(self, batch: DeviceBatch) -> StepOutput:
        """Launch a step. The last tokens change with its last operation, so a step that fails can be run again."""
        return self.sample(self.hidden(batch), batch)

    def hidden(self, batch: DeviceBatch) -> Tensor:
        """Launch what every token goes through: hidden states [num_tokens, hidden_size]."""
        inputs = batch.inputs
        token_ids = self._last_tokens.complete(batch)
        context = StepContext(inputs.attention, self._kv_caches)
        return self._model(token_ids, inputs.positions, context)

    def sample(self, hidden: Tensor, batch: DeviceBatch) -> StepOutput:
        """Launch what comes after: logits and the choice of tokens, which are kept."""
        inputs = batch.inputs
        # [num_sampling, hidden_size]: logits cost as much as several layers, so only for those who sample
        logits = self._model.compute_logits(gather_rows(hidden, inputs.sampling_tokens))
        chosen = inputs.sampling.choose(logits)
        self._last_tokens.keep(batch.sampling_slots, chosen)
        return StepOutput(logits, chosen, batch.sampling_slots, hidden)


class DeviceEagerBackend:
    """A `ForwardBackend` without CUDA graphs."""

    computes_with_torch = False

    def __init__(self, forward: DeviceForward, inputs: DeviceInputs) -> None:
        self._forward = forward
        self._inputs = inputs
        self.description = "triton eager"

    def forward(self, sizes: StepSizes) -> StepOutput:
        shape = StepShape(sizes.num_tokens, sizes.num_rows, sizes.num_sampling)
        lengths = StepLengths(tuple(sizes.query_lens.tolist()), tuple(sizes.seq_lens.tolist()))
        columns, tables = self._inputs.upload(shape, sizes.max_blocks)
        return self._forward(self._inputs.batch(columns, tables, shape, lengths))

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()
