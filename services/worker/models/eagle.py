"""The head of EAGLE-3, which guesses from states of another model: `triptych.checkpoint.eagle`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from triptych.checkpoint.eagle import EMBEDDING, Eagle3Spec
from triptych.errors import ModelError
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.embedding import LogitsHead, VocabEmbedding
from triptych_services.worker.layers.linear import ColumnLinear
from triptych_services.worker.layers.mlp import create_mlp
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.rotary import RotaryTables
from triptych_services.worker.layers.self_attention import SelfAttention
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import LoadedTensor
from triptych_services.worker.models.decoder import DecoderForCausalLM

OFFSETS, FLAGS = "d2t", "t2d"
"""Tensors of a head beside its weights: from its tokens to the model's, and whether it has a token of the model."""


class Eagle3Head(nn.Module):
    """One layer and a head, with the embedding of the model or its own; a `CausalLM`.

    Its tokens are those behind the ones of `StepContext.states_before`. What it returns for each is not normalised: a
    guess of its own goes on from that.
    """

    def __init__(self, spec: Eagle3Spec, *, context: ModelContext) -> None:
        """
        Args:
            context: Its architecture is that of `spec`.
        """
        super().__init__()
        architecture = context.architecture
        size, (layer,) = architecture.hidden_size, architecture.layers
        prefix = "layers.0"

        def norm(name: str) -> nn.Module:
            return create_norm(size, architecture.block.norm, context=context, prefix=name)

        self._architecture = architecture
        # in a tuple, since its weights are none of this module
        self._model: tuple[DecoderForCausalLM, ...] = ()
        self.adds_normalised = spec.adds_normalised
        self.embed_tokens: VocabEmbedding | None = None
        if spec.has_embedding:
            self.embed_tokens = VocabEmbedding(spec.vocab_size, size, context=context, prefix=EMBEDDING)
        self.fc = ColumnLinear(
            len(spec.layers) * spec.state_size,
            size,
            activation=None,
            bias=False,
            context=context,
            prefix="fc",
        )
        self.token_norm, self.state_norm = norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.hidden_norm")
        self.self_attn = SelfAttention(
            layer,
            layer_index=0,
            tables=RotaryTables(context=context),
            input_size=2 * size,
            context=context,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp_norm = norm(f"{prefix}.post_attention_layernorm")
        self.mlp = create_mlp(layer, context=context, prefix=f"{prefix}.mlp")
        self.norm = norm("norm")
        self.lm_head = LogitsHead(
            architecture.vocab_size, size, tied_to=None, context=context, prefix="lm_head"
        )

    def share(self, model: DecoderForCausalLM) -> None:
        """Use the embedding of a model from now on, if there is none here, or one with the same numbers.

        Ranks share that of theirs, which has fewer tokens than one here.
        """
        self._model = (model,)
        own, other = self.embed_tokens, model.model.embed_tokens
        assert other is not None, "a model that is no further stage"
        if own is None or not (isinstance(own.weight, Tensor) and isinstance(other.weight, Tensor)):
            return
        if own.weight.dtype == other.weight.dtype and torch.equal(own.weight, other.weight):
            self.embed_tokens = None

    def combine(self, states: Tensor) -> Tensor:
        """Map states of the model, [num_tokens, those of a token side by side], to [num_tokens, hidden_size]."""
        combined: Tensor = self.fc(states)
        return combined

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return float32 states [num_tokens, hidden_size]."""
        embed_tokens, states = self.embed_tokens, context.states_before
        assert states is not None, "given to the backend that computes this"
        if embed_tokens is None:
            (model,) = self._model
            embed_tokens = model.model.embed_tokens
        assert embed_tokens is not None, "see `share`"
        token, state = self.token_norm(embed_tokens(token_ids)), self.state_norm(states)
        residual = (state if self.adds_normalised else states).float()
        attended = self.self_attn(torch.cat((token, state), dim=-1), positions, context)
        normalised, residual = self.mlp_norm(attended, residual)
        return residual + self.mlp(normalised)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the head's own vocabulary."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        load_weights(self, tensors, self._architecture)


def tokens_of_head(directory: Path, offsets: torch.Tensor | None, spec: Eagle3Spec) -> torch.Tensor | None:
    """Return the ids in the model of a head's tokens.

    Args:
        directory: That of the head, for messages.
        offsets: Of each token, from its own id; None: the checkpoint has none.

    Raises:
        ModelError: They have another shape or type, or lead to no token of the model.
    """
    num_tokens = spec.architecture.vocab_size
    if offsets is None:
        if num_tokens == spec.vocab_size:
            return None
        raise ModelError(
            f"{directory}: {OFFSETS}: is missing, and the head has {num_tokens} of {spec.vocab_size} tokens"
        )
    if offsets.dtype != torch.int64 or tuple(offsets.shape) != (num_tokens,):
        raise ModelError(
            f"{directory}: {OFFSETS}: is {offsets.dtype} of shape {list(offsets.shape)}, must be int64 of shape "
            f"{[num_tokens]}"
        )
    tokens = torch.arange(num_tokens) + offsets
    outside = torch.nonzero((tokens < 0) | (tokens >= spec.vocab_size)).flatten()
    if outside.numel():
        first = int(outside[0])
        raise ModelError(
            f"{directory}: {OFFSETS}: token {first} of the head is {int(tokens[first])} of the model, which has "
            f"{spec.vocab_size} tokens; {outside.numel()} are outside of it"
        )
    return tokens
