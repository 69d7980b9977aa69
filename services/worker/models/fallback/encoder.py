"""Encoders that transformers computes: the texts of a step at once if only attention mixes tokens, else one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triptych.checkpoint.architecture import EncoderSpec
from triptych.types.step import F32
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.recording import NotRecordable
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.step_context import TextLayout
from triptych_services.worker.layers.weights import LoadedTensor
from triptych_services.worker.models.fallback.attention import Attention, AttentionCalls, TextCalls
from triptych_services.worker.models.fallback.decoder import Given
from triptych_services.worker.models.fallback.layers import (
    OtherParameters,
    allocate_others,
    kept_in_float32,
    replace_layers,
)
from triptych_services.worker.models.fallback.masks import describe_masks
from triptych_services.worker.models.fallback.names import TensorRules
from triptych_services.worker.models.fallback.skeleton import build_encoder, take_pooler


class EncoderParts(nn.Module):
    """Runs the body of a model for tokens, and what the class does after it for the state that its classifier reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Args:
            model: Its body becomes one that returns given states when `cut` is called.
        """
        super().__init__()
        self.body = model.base_model
        self.calls = AttentionCalls(is_causal=False)
        self.calls.connect(model)
        describe_masks(model)
        parameters = inspect.signature(self.body.forward).parameters
        self.has_token_types = (
            "token_type_ids" in parameters and getattr(model.config, "type_vocab_size", 0) > 0
        )
        """Whether tokens have types, so that the class is given them."""
        self._takes_positions = "position_ids" in parameters
        self._given = Given()
        self.whole = model

    def cut(self) -> None:
        """Take the pooler out of the body, and put given states in the place of the body."""
        self._pooler_activation = getattr(self.body, "pooler_activation", None)
        self._pooler = take_pooler(self.body)
        setattr(self.whole, self.whole.base_model_prefix, self._given)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor | None,
        attention: Attention | None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Compute the states [num_tokens, hidden_size] of tokens [num_tokens].

        Args:
            positions: [num_tokens] int64; None: as the class numbers the tokens of a text.
            attention: None: the class has its own.
            token_types: [num_tokens] int64; None: all are 0.
        """
        given: dict[str, Tensor] = {}
        if positions is not None and self._takes_positions:
            given["position_ids"] = positions[None]
        if self.has_token_types:
            given["token_type_ids"] = (torch.zeros_like(token_ids) if token_types is None else token_types)[
                None
            ]
        self.calls.attention = attention
        try:
            out = self.body(input_ids=token_ids[None], **given)
        finally:
            self.calls.attention = None
        states: Tensor = out[0][0]
        return states

    def score(self, pooled: Tensor) -> Tensor:
        """Return the scores [num_labels] of one text, of which the classifier reads the state [hidden_size]."""
        hidden = pooled[None, None]
        self._given.hidden, self._given.pooled = hidden, self._pool(hidden)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=pooled.device)
        scores: Tensor = self.whole(input_ids=ids).logits[0]
        return scores

    def _pool(self, hidden: Tensor) -> Tensor | None:
        pooler: Any = self._pooler
        if pooler is None:
            return None
        pooled: Tensor
        if self._pooler_activation is not None:  # a layer of no class of its own, as ALBERT has it
            pooled = self._pooler_activation(pooler(hidden[:, 0]))
        else:
            pooled = pooler(hidden)
        return pooled


class TransformersEncoder(nn.Module):
    """Any encoder of transformers; see `describe_encoder` for what it may do."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        """Create the class that `context.architecture.config` names, with our layers in it."""
        super().__init__()
        architecture = context.architecture
        assert architecture.encoder is not None, "described as an encoder"
        self._architecture, self._spec = architecture, architecture.encoder
        model = build_encoder(architecture.config, context.dtype, is_by_text=self._spec.is_by_text)
        ignore_other_heads(model, context.tensor_types, has_head=self._spec.head is not None)
        self._rules = TensorRules(model, context.tensor_types)
        context = replace(context, tensor_types=self._rules.tensor_types)
        kept = kept_in_float32(model, context.dtype)
        replace_layers(model, context, has_head=False)
        self.others = OtherParameters(allocate_others(model, context, kept))
        self.parts = EncoderParts(model)
        self.classifier: FallbackClassifier | None = None
        if self._spec.head is not None:
            self.parts.cut()
            self.classifier = FallbackClassifier(self.parts, self._spec, context)
        self._first_position = architecture.ends.learned_position_offset
        self._options: list[AttendOptions] = []

    def forward(self, token_ids: Tensor, positions: Tensor, layout: TextLayout) -> Tensor:
        """Return the states [num_tokens, hidden_size] after the last layer; see `Encoder`."""
        if self._spec.is_by_text:
            return self._text_by_text(token_ids, layout)
        if self._first_position:
            positions = positions + self._first_position
        states: Tensor = self.parts(
            token_ids, positions, TextCalls(layout, self._options), layout.token_types
        )
        return states

    def _text_by_text(self, token_ids: Tensor, layout: TextLayout) -> Tensor:
        if layout.seq_lens_list is None:
            raise NotRecordable("each text is a call of transformers' modules")
        lens = layout.seq_lens_list
        texts = zip(token_ids.split(lens), layout.token_types.split(lens), strict=True)
        return torch.cat([self.parts(ids, None, None, types) for ids, types in texts])

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        """Fill every parameter exactly once; see `CausalLM`."""
        load_weights(self, self._rules.apply(tensors), self._architecture)


class FallbackClassifier:
    """Computes what a class has behind its body, for one text at a time."""

    def __init__(self, parts: EncoderParts, spec: EncoderSpec, context: ModelContext) -> None:
        assert spec.head is not None, "described with a head"
        self.pooling = spec.head.pooling
        self._parts = parts
        self._dtype, self._device = context.dtype, context.device

    def of_vector(self, pooled: F32) -> F32:
        """Return the scores [num_labels] of one text, of which the pooled states are [hidden_size]."""
        with torch.inference_mode():
            state = torch.from_numpy(pooled).to(self._device, self._dtype)
            scores: F32 = self._parts.score(state).float().numpy(force=True)
        return scores


def ignore_other_heads(model: PreTrainedModel, names: Iterable[str], *, has_head: bool) -> None:
    """Let a model ignore tensors of buffers that older files hold, and of heads that it is built without."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)(position_ids|token_type_ids)$"]
    if not has_head:
        prefix = f"{model.base_model_prefix}."
        ignored.append(r"(^|\.)pooler\.")
        if any(name.startswith(prefix) for name in names):
            ignored.append(rf"^(?!{prefix})")
    model._keys_to_ignore_on_load_unexpected = ignored
