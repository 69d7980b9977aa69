"""Token ids to hidden states, and hidden states to logits; ranks share out the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.layers.weights import (
    LinearWeight,
    WeightedLayer,
    WeightTarget,
    create_linear_weight,
    empty_parameter,
    linear_target,
    share,
)
from triptych.config.resolved import ResolvedConfig
from triptych_kernels.ops import embedding, linear


class VocabEmbedding(WeightedLayer):
    """A row of weights per token: where the residual stream begins, so in float32, see docs/adr/0003.

    A model that ties it to its `LogitsHead` holds it in the form that products want.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, config: ResolvedConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        """Of all ranks together."""
        self.start, length = share(vocab_size, what="vocab_size", config=config)
        self.weight: LinearWeight
        if config.architecture.tie_word_embeddings:
            self.weight, _ = create_linear_weight(
                length, hidden_size, sources=[f"{prefix}.weight"], config=config, is_head=True
            )
        else:
            self.weight = empty_parameter(length, hidden_size, config=config)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64, ids of this rank's rows counted from its first
        -> float32 [num_tokens, hidden_size]"""
        return embedding(token_ids, self.weight, out_dtype=torch.float32)

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{self.prefix}.weight": linear_target(self.weight, shape, start=self.start)}


class LogitsHead(WeightedLayer):
    """A score per token of this rank's part of the vocabulary.

    Tied, it reads the weight of the embedding and has none of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabEmbedding | None,
        config: ResolvedConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.is_tied = tied_to is not None
        self.start, length = share(vocab_size, what="vocab_size", config=config)
        if tied_to is None:
            self.weight, _ = create_linear_weight(
                length, hidden_size, sources=[f"{prefix}.weight"], config=config, is_head=True
            )
        else:
            self.weight = tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 logits [num_rows, this rank's vocabulary]"""
        return linear(hidden, self.weight, out_dtype=torch.float32)

    def weight_targets(self) -> dict[str, WeightTarget]:
        if self.is_tied:
            return {}
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{self.prefix}.weight": linear_target(self.weight, shape, start=self.start)}
