"""The interface of a model, whichever family it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from services.worker.context.model_context import ModelContext
from services.worker.layers.quantization import StoredBlocks
from services.worker.layers.step_context import StepContext


class CausalLM(Protocol):
    """A decoder that predicts the next token; an nn.Module whose weights are undefined until they are loaded."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        """Allocate this rank's share of the weights, in the form in which they are computed with.

        Args:
            context: Config, connected ranks, and facts of the checkpoint.
            prefix: Prefix of the model's tensor names in the checkpoint, with the dot; empty unless the model is part
                of another one.

        Raises:
            FeatureDisabled: The architecture or the number of ranks is not supported.
        """
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Compute the hidden states [num_tokens, hidden_size] of a step's tokens, and write their keys and values.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, the position of each token in its sequence.
            context: What the step hands to the layers.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [num_rows, vocab_size] of some hidden states [num_rows, hidden_size]."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor | StoredBlocks]]) -> None:
        """Fill every parameter exactly once from Hugging Face-named tensors.

        Each tensor is copied before the next is read.

        Raises:
            ModelError: A tensor is missing, unexpected, given twice or of another shape; names it.
        """
        ...
