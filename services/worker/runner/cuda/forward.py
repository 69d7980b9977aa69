"""The launches of one step on an asynchronous device, and the tokens that stay there between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych_kernels.ops import gather_rows
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.models.base import CausalLM, logits_of
from triptych_services.worker.runner.backend import StepOutput, without_samples
from triptych_services.worker.runner.cuda.inputs import DeviceBatch, DeviceInputs, StepLengths, StepShape
from triptych_services.worker.runner.step_inputs import StepSizes


class LastTokens:
    """The last token of each slot, on the device: the next step's input before the host knows it.

    Read and written by kernels only, in the order of the steps.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        # one more: tokens sampled by padding are kept behind the last slot
        self._token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def complete(self, batch: DeviceBatch) -> Tensor:
        """Return the step's token ids [num_tokens], those included that the host still awaits."""
        kept = self._token_ids.index_select(0, batch.token_slots)
        return torch.where(batch.is_awaited, kept, batch.inputs.token_ids)

    def keep(self, slots: Tensor, token_ids: Tensor) -> None:
        """Remember sampled tokens, [num_sampling] each; 0 in place of -1, as the host does for a row that failed."""
        self._token_ids.index_copy_(0, slots, token_ids.clamp_min(0))


class DeviceForward:
    """The launches of a step, wherever its inputs are in the device's memory."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[KvCache],
        last_tokens: LastTokens,
        *,
        samples: bool = True,
    ) -> None:
        """
        Args:
            samples: Whether the model has a head; if not, no row samples.
        """
        self._samples = samples
        self._model = model
        self._kv_caches = kv_caches
        self._state_pages = [cache.state for cache in kv_caches]
        self._last_tokens = last_tokens

    def __call__(self, batch: DeviceBatch) -> StepOutput:
        """Launch a step. Its last operation changes the last tokens, so a step that fails can be run again."""
        return self.sample(self.hidden(batch), batch)

    def hidden(self, batch: DeviceBatch) -> Tensor:
        """Launch the layers, which every token passes, and return the hidden states [num_tokens, hidden_size]."""
        inputs = batch.inputs
        token_ids = self._last_tokens.complete(batch)
        context = StepContext(
            inputs.attention, self._kv_caches, inputs.state, inputs.adapter_slots, self._state_pages
        )
        return self._model(token_ids, inputs.positions, context)

    def sample(self, hidden: Tensor, batch: DeviceBatch) -> StepOutput:
        """Launch logits and the choice of tokens, which are kept."""
        if not self._samples:
            return without_samples(hidden)
        inputs = batch.inputs
        # [num_sampling, hidden_size]: logits cost as much as several layers, so only for rows that sample
        sampled = gather_rows(hidden, inputs.sampling_tokens)
        logits = logits_of(self._model, sampled, inputs.sampling_adapters)
        chosen = inputs.sampling.choose(logits)
        self._last_tokens.keep(batch.sampling_slots, chosen)
        return StepOutput(logits, chosen, batch.sampling_slots, hidden)


class EagerPath:
    """A `StepPath` for all steps: operations are launched one by one."""

    description = "triton eager"

    def __init__(self, forward: DeviceForward, inputs: DeviceInputs) -> None:
        self._forward = forward
        self._inputs = inputs

    def serves(self, sizes: StepSizes) -> bool:
        return True

    def forward(self, sizes: StepSizes) -> StepOutput:
        shape = StepShape(sizes.num_tokens, sizes.num_rows, sizes.num_sampling)
        lengths = StepLengths(tuple(sizes.query_lens.tolist()), tuple(sizes.seq_lens.tolist()))
        columns, tables = self._inputs.upload(shape, sizes.max_seq_len)
        return self._forward(self._inputs.batch(columns, tables, shape, lengths))

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return ()
