"""What the worker needs of every model, whichever family it is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from services.worker.attention.base import AttentionBatch, KvCache
from services.worker.context.resolved import ResolvedConfig
from services.worker.layers.quantization import StoredBlocks


class CausalLM(Protocol):
    """A decoder that predicts the next token; an nn.Module whose weights are undefined until loaded."""

    def __init__(self, *, config: ResolvedConfig, prefix: str = "") -> None:
        """Create this rank's storage.

        Args:
            prefix: of its tensors' names in the checkpoint, with the dot; a model inside another has one.
        Raises:
            FeatureDisabled: the architecture or the ranks ask for something that is not built.
        """
        ...

    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KvCache], batch: AttentionBatch
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of a step's tokens, writing their keys and values.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, of each token in its sequence.
            kv_caches: one per layer, handed to its attention.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [num_rows, vocab_size] of some hidden states [num_rows, hidden_size]."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor | StoredBlocks]]) -> None:
        """Fill every parameter exactly once from Hugging Face-named tensors, each copied before the next is read.

        Raises:
            ModelError: a tensor is missing, unexpected, given twice or of another shape; names it.
        """
        ...
