"""A model of transformers in two parts: token ids to hidden states, and hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from triptych_services.worker.models.fallback.attention import Attention, AttentionCalls
from triptych_services.worker.models.fallback.masks import describe_masks
from triptych_services.worker.models.fallback.skeleton import text_body


class Decoder(nn.Module):
    """Runs the body for all tokens of a step, and what the class does after it for the rows that need logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Cut the model in two, in place.

        Raises:
            FeatureDisabled: The class has no body of its own.
        """
        super().__init__()
        name, self.body = text_body(model)
        self.calls = AttentionCalls()
        self.calls.connect(model)
        describe_masks(model)
        self.given = Given()
        setattr(model, name, self.given)
        self.ends = model
        """The model with its body replaced by given hidden states."""

    def forward(self, token_ids: Tensor, positions: Tensor | None, attention: Attention) -> Tensor:
        """Compute the hidden states [num_tokens, hidden_size] of tokens [num_tokens].

        Args:
            positions: [num_tokens] int64; None: as the class numbers the tokens of a sequence.
        """
        given = {} if positions is None else {"position_ids": positions[None]}
        self.calls.attention = attention
        try:
            out = self.body(input_ids=token_ids[None], use_cache=False, **given)
        finally:
            self.calls.attention = None
        hidden: Tensor = out[0][0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        self.given.hidden = hidden[None]
        # not the ids of the rows, which nothing after the body reads
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.ends(input_ids=ids, use_cache=False).logits[0]
        return logits


class Given(nn.Module):
    """Hidden states that are known, in the place of the body that computes them."""

    hidden: Tensor
    pooled: Tensor | None = None
    """The body's pooler's output, if the body has a pooler."""

    @property
    def decoder(self) -> Given:
        """For classes that call a part of their body."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Output(last_hidden_state=self.hidden, pooler_output=self.pooled)


@dataclass
class Output(ModelOutput):
    """The output of a body; what a class asks for besides is None."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None
