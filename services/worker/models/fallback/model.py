"""A `CausalLM` that computes with transformers' modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import LoadedTensor
from triptych_services.worker.models.fallback.attention import PagedCalls
from triptych_services.worker.models.fallback.decoder import Decoder
from triptych_services.worker.models.fallback.experts import pack_experts
from triptych_services.worker.models.fallback.layers import (
    OtherParameters,
    allocate_others,
    kept_in_float32,
    replace_layers,
)
from triptych_services.worker.models.fallback.names import TensorRules
from triptych_services.worker.models.fallback.skeleton import build


class TransformersForCausalLM(nn.Module):
    """Any decoder of transformers over the paged cache; see `probe` for what it may do."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        """Create the class that `context.architecture.config` names, with our layers in it.

        Raises:
            FeatureDisabled: transformers has no such class, or there are several ranks.
        """
        super().__init__()
        if context.rank.num_ranks > 1:
            raise FeatureDisabled(
                f"{context.rank.num_ranks} ranks",
                "model.backend = transformers computes on one; set parallel.tensor_parallel_size to 1",
            )
        self._architecture = context.architecture
        model = build(context.architecture.config, context.dtype)
        self._rules = TensorRules(model, context.tensor_types)
        context = replace(context, tensor_types=self._rules.tensor_types)
        kept = kept_in_float32(model, context.dtype)
        replace_layers(model, context)
        pack_experts(model, context, kept)
        self.others = OtherParameters(allocate_others(model, context, kept))
        self.decoder = Decoder(model)
        self._first_position = context.architecture.ends.learned_position_offset
        self._options: list[AttendOptions] = []

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Compute the hidden states [num_tokens, hidden_size] of a step; see `CausalLM`."""
        if self._first_position:
            positions = positions + self._first_position
        hidden: Tensor = self.decoder(token_ids, positions, PagedCalls(context, self._options))
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [num_rows, vocab_size] of some hidden states [num_rows, hidden_size]."""
        return self.decoder.compute_logits(hidden).float()

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        """Fill every parameter exactly once; see `CausalLM`."""
        load_weights(self, self._rules.apply(tensors), self._architecture)
