"""Token ids to hidden states, and hidden states to logits; ranks share out the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import embedding, linear

from services.worker.layers.weights import WeightedLayer, WeightTarget, empty_parameter, share
from triptych.config.resolved import ResolvedConfig


class VocabEmbedding(WeightedLayer):
    """A row of weights per token."""

    def __init__(self, vocab_size: int, hidden_size: int, *, config: ResolvedConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        """Of all ranks together."""
        self.start, length = share(vocab_size, what="vocab_size", config=config)
        self.weight = empty_parameter(length, hidden_size, config=config)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64, ids of this rank's rows counted from its first -> [num_tokens, hidden_size]"""
        return embedding(token_ids, self.weight)

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{self.prefix}.weight": WeightTarget(self.weight, shape, start=self.start)}


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
        self.weight = (
            empty_parameter(length, hidden_size, config=config) if tied_to is None else tied_to.weight
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 logits [num_rows, this rank's vocabulary]"""
        return linear(hidden, self.weight).float()

    def weight_targets(self) -> dict[str, WeightTarget]:
        if self.is_tied:
            return {}
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{self.prefix}.weight": WeightTarget(self.weight, shape, start=self.start)}
