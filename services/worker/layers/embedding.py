"""Token ids to hidden states, and hidden states to logits; ranks share the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import LayerInputsSpec, NormSpec
from triptych_kernels.ops import adapt_embedding, clear_other_rows, embedding, linear, local_ids
from triptych_kernels.weights.adapters import AdaptedRows
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.adapted import AdaptedLayer, AdaptedPiece
from triptych_services.worker.layers.linear import PackedLinear, Piece
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.weights import (
    AnyWeight,
    WeightedLayer,
    WeightTarget,
    bias_target,
    create_linear_weight,
    empty_parameter,
    linear_target,
    parameter_target,
)
from triptych_services.worker.parallel.shares import vocab_lengths


class VocabEmbedding(AdaptedLayer):
    """One row of weights per token. Its output starts the residual stream, so it is float32: docs/adr/0003.

    A model that ties it to its `LogitsHead` holds it in the form that the product reads.
    """

    is_lookup = True

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        has_head: bool = True,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            has_head: Whether the model's head reads the weight if it is tied.
        """
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        """Number of tokens, of all ranks together."""
        self.group = context.group
        lengths, rank = vocab_lengths(vocab_size, rank=context.rank), context.rank.tensor_parallel_rank
        self.start, length = sum(lengths[:rank]), lengths[rank]
        self.weight: AnyWeight
        if has_head and context.architecture.tie_word_embeddings:
            self.weight, _ = create_linear_weight(
                length, hidden_size, sources=[f"{prefix}.weight"], context=context, is_head=True
            )
        else:
            self.weight = empty_parameter(
                length, hidden_size, context=context, dtype=_table_dtype(f"{prefix}.weight", context)
            )

    def forward(self, token_ids: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens] int64 to float32 [num_tokens, hidden_size], on every rank."""
        adapters = self.adapters_of(adapter_slots)
        if self.group.tensor_parallel_size == 1:
            found = embedding(token_ids, self.weight, out_dtype=torch.float32)
            return found if adapters is None else adapt_embedding(found, token_ids, adapters)
        own_ids = local_ids(token_ids, self.start, self.weight.shape[0])
        found = embedding(own_ids, self.weight, out_dtype=torch.float32)
        if adapters is not None:
            found = adapt_embedding(found, own_ids, adapters)
        # one rank has the row and the others add zeros, so the float32 sum is exact
        hidden: Tensor = self.group.all_reduce(
            clear_other_rows(found, token_ids, self.start, self.weight.shape[0])
        )
        return hidden

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{self.prefix}.weight": linear_target(self.weight, shape, start=self.start)}

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        hidden_size, length = self.weight.shape[1], self.weight.shape[0]
        # as a product it maps a token to a state, so its inputs are the vocabulary
        shape, rows = (hidden_size, self.vocab_size), AdaptedRows(0, hidden_size)
        return (AdaptedPiece(self.prefix, shape, rows, dim=1, start=self.start, length=length),)


class LayerInputs(nn.Module):
    """The inputs of all layers by token, as `LayerInputsSpec` has them; `prefix` is that of the decoder."""

    def __init__(
        self, spec: LayerInputsSpec, hidden_size: int, norm: NormSpec, *, context: ModelContext, prefix: str
    ) -> None:
        super().__init__()
        self.size, self.dtype = spec.size, context.dtype
        size = spec.size * context.architecture.num_layers
        self.table = VocabEmbedding(
            spec.vocab_size, size, has_head=False, context=context, prefix=f"{prefix}.embed_tokens_per_layer"
        )
        self.projection = PackedLinear(
            hidden_size,
            (Piece("per_layer_model_projection", size, 0, size),),
            bias=False,
            context=context,
            prefix=prefix,
        )
        # what is normalised is divided by sqrt(hidden_size) in the model, which only `eps` can tell
        self.norm = create_norm(
            spec.size,
            replace(norm, eps=norm.eps * hidden_size),
            context=context,
            prefix=f"{prefix}.per_layer_projection_norm",
        )

    def forward(self, token_ids: Tensor, embedded: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map tokens and their embeddings, float32, to [num_tokens, num_layers * size] in the model's precision."""
        rows = self.table(token_ids, adapter_slots)
        projected = self.projection(embedded.to(self.dtype), adapter_slots)
        # [num_tokens, num_layers, size]
        normalised = self.norm(projected.view(len(projected), -1, self.size))
        summed = normalised.view(projected.shape) * 0.5**0.5 + rows * (0.5 * self.size) ** 0.5
        return summed.to(self.dtype)


class PositionEmbedding(WeightedLayer):
    """One learned row per position, which is added to the token's. Every rank holds all of it, in float32."""

    def __init__(
        self, num_rows: int, hidden_size: int, *, offset: int, context: ModelContext, prefix: str
    ) -> None:
        """
        Args:
            num_rows: Of the checkpoint's table.
            offset: Row of position 0; those before it are left out here.
        """
        super().__init__()
        self.prefix = prefix
        self.offset = offset
        self.weight = empty_parameter(num_rows - offset, hidden_size, context=context, dtype=torch.float32)

    def forward(self, positions: Tensor) -> Tensor:
        """Map [num_tokens] int64 to float32 [num_tokens, hidden_size]."""
        return embedding(positions, self.weight)

    def weight_targets(self) -> dict[str, WeightTarget]:
        rows, hidden_size = self.weight.shape
        # ranks that share an axis read a part of it, as this table leaves out its first rows
        target = WeightTarget(self.weight.copy_, (rows + self.offset, hidden_size), rows, start=self.offset)
        return {f"{self.prefix}.weight": target}


def _table_dtype(name: str, context: ModelContext) -> torch.dtype:
    """Return the precision of a table that is only looked up: bfloat16 where that loses nothing, at half the memory."""
    is_bfloat16 = context.device.type == "cpu" and context.stored_dtype([name]) == torch.bfloat16
    return torch.bfloat16 if is_bfloat16 else context.dtype


class LogitsHead(AdaptedLayer):
    """A score per token: each rank computes its part of the vocabulary, and all ranks gather the whole.

    Every rank then draws the same tokens: the gathered logits have the same bits, the random numbers are keyed by the
    request, and equal kernels on equal processors choose alike. So no tokens are sent between ranks.

    A tied head reads the weight of the embedding and has none of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabEmbedding | None,
        bias: bool = False,
        context: ModelContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.is_tied = tied_to is not None
        self.group = context.group
        self.lengths, rank = vocab_lengths(vocab_size, rank=context.rank), context.rank.tensor_parallel_rank
        self.start = sum(self.lengths[:rank])
        self.has_bias = bias
        self.bias: nn.Parameter | None = None
        if tied_to is None:
            self.weight, self.bias = create_linear_weight(
                self.lengths[rank],
                hidden_size,
                sources=[f"{prefix}.weight"],
                context=context,
                bias=bias,
                is_head=True,
            )
        else:
            assert not bias, "an embedding has none"
            self.weight = tied_to.weight

    def forward(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_rows, hidden_size] to float32 logits [num_rows, vocab_size], on every rank."""
        adapters = self.adapters_of(adapter_slots)
        own = linear(hidden, self.weight, self.bias, out_dtype=torch.float32, adapters=adapters)
        logits: Tensor = self.group.all_gather(own, self.lengths)
        return logits

    def weight_targets(self) -> dict[str, WeightTarget]:
        if self.is_tied:
            return {}
        shape = (self.vocab_size, self.weight.shape[1])
        targets = {f"{self.prefix}.weight": linear_target(self.weight, shape, start=self.start)}
        if self.has_bias:
            targets[f"{self.prefix}.bias"] = bias_target(
                self.weight, self.bias, self.vocab_size, start=self.start
            )
        return targets

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        # a head that reads the embedding's weight is a module of its own in the model that adapters are trained on
        base, has_weight_of_embedding, _ = self.prefix.partition("model.embed_tokens")
        name = f"{base}lm_head" if has_weight_of_embedding else self.prefix
        length, hidden_size = self.weight.shape
        rows = AdaptedRows(0, length)
        return (AdaptedPiece(name, (self.vocab_size, hidden_size), rows, start=self.start, length=length),)


class ScoreHead(WeightedLayer):
    """The weight of a classifier, which is applied to pooled states on the host. The last stage holds it in float32."""

    def __init__(self, num_labels: int, hidden_size: int, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = empty_parameter(num_labels, hidden_size, context=context, dtype=torch.float32)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {f"{self.prefix}.weight": parameter_target(self.weight, tuple(self.weight.shape))}
